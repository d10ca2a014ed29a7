"""The measuring process: a JSON problem on each line of stdin, an answer on each line of stdout."""

from __future__ import annotations

import json
import os
import select
import sys
from collections.abc import Mapping
from typing import Any

#: Seconds without a question after which the process ends: it holds memory of the device.
IDLE = 60.0


def main() -> None:
    """Answer until nobody asks any more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what torch and compilers print is no answer
    asked = sys.stdin.buffer.fileno()
    rest = b""
    while select.select([asked], [], [], IDLE)[0]:
        some = os.read(asked, 1 << 16)
        if not some:
            return
        *lines, rest = (rest + some).split(b"\n")
        for line in lines:
            answers.write(json.dumps(answer(json.loads(line))) + "\n")
            answers.flush()


def answer(asked: Mapping[str, Any]) -> dict[str, Any]:
    """{"rows": of each section}, {"unable": why} or {"error": what was raised}.

    Args:
        asked: "section", "row", "kernels"; "device" and "index"; "threads" of a CPU.
    """
    import torch

    from ..sites import error_text
    from .case import UnableError
    from .measuring import NotFusedError, clean_up
    from .problem import rows_of

    try:
        set_up(asked)
        return {"rows": rows_of(asked["section"], asked["row"], asked["kernels"], asked["device"])}
    except (UnableError, NotFusedError) as error:
        return {"unable": error_text(error)}
    except torch.OutOfMemoryError:
        return {"error": "out of memory"}
    except Exception as error:
        return {"error": error_text(error)}
    finally:
        clean_up(asked["device"])


def set_up(asked: Mapping[str, Any]) -> None:
    """Settings that a problem is measured under."""
    import torch

    from .. import _inductor

    _inductor.compile_each_anew()
    _inductor.without_attention_patterns()
    tf32 = bool(asked["row"].get("tf32"))
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    if asked["device"] == "cuda":
        torch.cuda.set_device(asked["index"])
    else:
        torch.set_num_threads(asked["threads"])
