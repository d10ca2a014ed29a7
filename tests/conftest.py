"""Environment and fixtures for all tests."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# All of this must be in the environment before torch is imported, and child processes inherit it.

# Passes do not run on a warm cache, so a session (each xdist worker has its own) starts cold.
_cache_dir = tempfile.mkdtemp(prefix="inductor_fusions_tests_")
atexit.register(shutil.rmtree, _cache_dir, ignore_errors=True)
os.environ["TORCHINDUCTOR_CACHE_DIR"] = _cache_dir
os.environ.pop("TRITON_CACHE_DIR", None)  # else it would be shared; Inductor puts it below its own

# The user's toggles must not decide what is tested.
for _name in [name for name in os.environ if name.startswith("INDUCTOR_FUSIONS")]:
    del os.environ[_name]

# Scalar C++: what is tested does not depend on vector instructions, and it compiles three times as fast.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")

# A kernel that was compiled for another test, or for stock, is not compiled again.
_compiler = shutil.which("g++")
if _compiler and shutil.which("sha256sum") and not {"TESTS_CXX", "CXX"} & os.environ.keys():
    os.environ["TESTS_CXX"] = _compiler
    os.environ["TESTS_CXX_CACHE"] = tempfile.mkdtemp(prefix="inductor_fusions_cxx_")
    atexit.register(shutil.rmtree, os.environ["TESTS_CXX_CACHE"], ignore_errors=True)
    os.environ["CXX"] = str(Path(__file__).parent / "support" / "g++")

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

_under_xdist = "PYTEST_XDIST_WORKER" in os.environ
if _under_xdist:
    # The workers already fill the cores: one thread each, also to compile.
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import pytest
import torch

from tests import durations, selection
from tests.support.dynamo import spend_less

if _under_xdist:
    torch.set_num_threads(1)

try:
    from hypothesis import settings
except ImportError:
    pass
else:
    # A first example may compile; and CI must not fail on a new random example.
    settings.register_profile("default", deadline=None, derandomize="CI" in os.environ)
    settings.load_profile("default")


def pytest_configure(config: pytest.Config) -> None:
    spend_less()
    durations.configure(config)
    selection.configure(config)
    # Said at each compile without caches, which is how most tests compile.
    config.addinivalue_line("filterwarnings", "ignore:dynamo_pgo force disabled")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the tests marked long as well")
    durations.addoption(parser)
    selection.addoption(parser)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--long"):
        skip = pytest.mark.skip(reason="long: give --long")
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(skip)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def pytest_collection_finish(session: pytest.Session) -> None:
    """A million objects are there from the imports; the collector need not look at them in each test."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def clean_compiler() -> None:
    """No compiled code, recompile limit, counter or random state is left from the test before."""
    torch.manual_seed(0)
    if "torch._dynamo" not in sys.modules:  # then nothing was compiled
        return
    torch._dynamo.reset()
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is not None:
        utils.counters.clear()


@pytest.fixture(autouse=True)
def nothing_is_recovered(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a compile raises reaches the test, although the caller would get stock's code."""
    if "inductor_fusions" not in sys.modules or request.node.get_closest_marker("recovers"):
        return
    from inductor_fusions.driver import recovery, trials

    def raised(found: Any, error: Exception, call: Any) -> Any:
        raise error

    for owner in (trials.Trials, recovery.Backward):
        monkeypatch.setattr(owner, "_may_be_ours", lambda found: False)
        monkeypatch.setattr(owner, "_relaunched", raised)


@pytest.fixture
def also_run(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Lets a fusion before autograd run after those of the package."""
    from inductor_fusions import _inductor

    def add(fusion: Any) -> None:
        (held,) = [item for item in _inductor.get_hook("pre_grad") if hasattr(item, "fusions")]
        monkeypatch.setattr(held, "_fusions", (*held.fusions, fusion))

    return add


@pytest.fixture
def any_device() -> Iterator[None]:
    """Fusions before autograd decide as on a GPU; the operations have a meaning on every device."""
    from tests.support.on_a_gpu import on_a_gpu

    with on_a_gpu():
        yield


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The line on stderr of a command that the user got wrong."""

    def refused(*arguments: str) -> str:
        from inductor_fusions import cli

        monkeypatch.setattr(sys, "argv", ["inductor-fusions", *arguments])
        with pytest.raises(SystemExit) as exit:
            cli.main()
        out, err = capsys.readouterr()
        assert (exit.value.code, out) == (2, "")
        assert err.count("\n") == 1 and err.startswith("inductor-fusions: "), err
        return err

    return refused


@pytest.fixture
def fresh_cache() -> Iterator[None]:
    """An empty Inductor cache for this test alone."""
    from torch._inductor.utils import fresh_cache

    with fresh_cache():
        yield


@pytest.fixture
def own_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder where the measurements of devices are looked for."""
    from inductor_fusions.decisions import tables

    (tmp_path / "devices").mkdir()
    monkeypatch.setattr(tables, "folder", lambda: tmp_path)
    for cached in (tables.load, tables.digest):
        cached.cache_clear()
    yield tmp_path / "devices"
    for cached in (tables.load, tables.digest):
        cached.cache_clear()


@pytest.fixture
def shelf(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Gives tables by device, whose rows are checked; the device that is asked for is an H100, or `on`."""

    def put(on: str = "nvidia_h100_80gb_hbm3", **found: dict[str, Any]) -> None:
        from inductor_fusions.decisions import devices, tables
        from inductor_fusions.decisions.problems import SECTIONS

        for table in found.values():
            for section, rows in table.items():
                for row in rows:
                    SECTIONS[section].check(row)
        monkeypatch.setattr(tables, "load", lambda name: tables.Table(found[name]) if name in found else None)
        monkeypatch.setattr(tables, "names", lambda: sorted(found))
        monkeypatch.setattr(tables, "device_name", lambda device: on)
        monkeypatch.setattr(devices, "hardware", lambda device: devices.known(on))

    return put


@pytest.fixture
def tf32() -> Iterator[None]:
    """torch may multiply float32 as TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device there is: the test runs once on each."""
    return torch.device(request.param)


@pytest.fixture
def mesh(device: torch.device) -> Iterator[Any]:
    """A mesh of this one process; `tests/torch_features/test_distributed.py` has two."""
    dist = pytest.importorskip("torch.distributed")
    if not dist.is_available():
        pytest.skip("this torch has no torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh

    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh(device.type, (1,))
    finally:
        dist.destroy_process_group()
