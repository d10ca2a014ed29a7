"""The command line: what it prints, as text and as JSON, and how it says no."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from typer.testing import CliRunner

import inductor_fusions
from inductor_fusions import cli, config
from inductor_fusions.cli import environment, models
from inductor_fusions.decisions import tables
from inductor_fusions.fusions import ALL
from tests.support.processes import start

Refuse = Callable[..., str]

TINY = """
import torch

class Attention(torch.nn.Module):
    def forward(self, x, mask=None):
        scores = x @ x.transpose(-2, -1) / 4
        if mask is not None:
            scores = scores + mask
        weights = torch.softmax(scores, dim=-1)
        return weights @ x

class Kept(torch.nn.Module):
    def forward(self, x):
        weights = torch.softmax(x @ x.transpose(-2, -1), dim=-1)
        return weights @ x, weights

def make():
    return Attention(), {"x": torch.randn(2, 3, 8, 16)}

def keeps_weights():
    return Kept(), {"x": torch.randn(2, 3, 8, 16)}

def needs_grad():
    return Attention(), {"x": torch.randn(2, 3, 8, 16, requires_grad=True)}

def wrong_shapes():
    return Attention(), {"x": torch.randn(2, 3, 8, 16), "mask": torch.zeros(7)}

def broken():
    raise RuntimeError("first line\\nsecond line")

def only_a_model():
    return Attention()
"""


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of a module, in the current folder, with models to explain."""
    (tmp_path / "tiny_models.py").write_text(TINY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "tiny_models", raising=False)
    return "tiny_models"


def run(*arguments: str) -> str:
    """What a command that succeeds prints."""
    done = CliRunner().invoke(cli.app, [*arguments])
    assert done.exit_code == 0, (done.output, done.exception)
    return done.stdout


def run_json(*arguments: str) -> Any:
    found = json.loads(run(*arguments, "--json"))
    assert found["schema"] == 1
    return found


# -- env and list ---------------------------------------------------------------------------------


def test_env(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INDUCTOR_FUSIONS_STRICT", "0")
    found = run_json("env")
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["inductor_fusions"] == inductor_fusions.__version__
    assert found["enabled"] is True
    assert any("FusionPass" in item for item in found["hooks"]["pre_grad"]["passes"])
    toggles = {toggle["variable"]: toggle for toggle in found["toggles"]}
    assert toggles["INDUCTOR_FUSIONS_STRICT"] == {
        "name": "strict", "variable": "INDUCTOR_FUSIONS_STRICT", "value": 0, "from": "environment",
    }  # fmt: skip
    assert toggles["INDUCTOR_FUSIONS"]["from"] == "default"
    assert toggles["INDUCTOR_FUSIONS_POLICY"]["value"] == "profitable"
    text = run("env")
    for shown in (torch.__version__, "INDUCTOR_FUSIONS_ATTENTION", "pre_grad_custom_pass", "for this device"):
        assert shown in text


def test_env_shows_hooks_that_are_not_installed() -> None:
    inductor_fusions.disable()
    try:
        assert run_json("env")["hooks"]["pre_grad"]["passes"] == []
        assert "nothing installed" in run("env")
    finally:
        inductor_fusions.enable()


#: The head of a table; the device of a table for CPUs may be any.
TABLE = {"schema": tables.SCHEMA, "device": "a CPU", "torch": "2.13.0", "date": "2026-01-01"}


def test_env_shows_tables(own_tables: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = run_json("env")["tables"]["device"]
    (own_tables / f"{name}.json").write_text(json.dumps({**TABLE, "attention": []}))
    (own_tables / "other.json").write_text("{")
    tables.load.cache_clear()
    monkeypatch.setenv(tables.VARIABLE, "no/such")
    found = run_json("env")["tables"]
    assert found["found"] is True
    assert found["folders"][str(own_tables)] == 2 and found["folders"]["no/such"] is None
    assert "no/such: no such folder" in run("env")
    assert {entry["file"]: entry["usable"] for entry in found["files"]} == {
        f"devices/{name}.json": True,
        "devices/other.json": False,
    }
    assert {entry["file"]: entry["measured_with"] for entry in found["files"]} == {
        f"devices/{name}.json": {"torch": TABLE["torch"]},
        "devices/other.json": {},
    }


@pytest.mark.parametrize(
    ("installed", "told"), [("3.6.1", False), ("3.9.0", True), ("3.60.0", True), (None, False)]
)
def test_a_table_that_another_triton_was_measured_with(installed: str | None, told: bool) -> None:
    found = environment.another_triton({**TABLE, "triton": "3.6.0"}, installed)
    assert bool(found) is told
    assert not told or ("3.6.0" in found and str(installed) in found)
    assert not environment.another_triton(TABLE, installed) and not environment.another_triton(
        None, installed
    )


def test_env_shows_assigned_toggles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INDUCTOR_FUSIONS_STRICT", "1")
    monkeypatch.setenv("INDUCTOR_FUSIONS_QKV", "on")
    with config.patch(policy="always"):
        toggles = {toggle["name"]: toggle for toggle in run_json("env")["toggles"]}
    assert (toggles["policy"]["value"], toggles["policy"]["from"]) == ("always", "assigned")
    assert (toggles["strict"]["value"], toggles["strict"]["from"]) == (0, "assigned")
    assert toggles["attention"]["from"] == "default"
    assert (toggles["qkv"]["value"], toggles["qkv"]["from"]) == (1, "environment")


def test_list_shows_gains(own_tables: Path) -> None:
    """From the tables alone: shapes that were measured, and what was gained where it pays."""
    shape = {"batch": 1, "heads": 2, "q_len": 8, "kv_len": 8, "head_dim": 8, "dtype": "float32"}
    shape |= {"mask": "none", "train": False}
    rows = [{**shape, "gain": {"sdpa": gain, "efficient": 0.5}} for gain in (0.9, 1.5, 2.0, 4.0)]
    linear = {"layout": ["nt"], "dtype": "bfloat16", "tokens": 1, "capability": [9, 0], "m": None, "k": [8]}
    kinds = {"gated": 3.0, "shared_a": 1.2, "sum": 1.4, "linear": 1.0}
    tile = {"template": "row", "block_m": 1, "block_n": 1, "block_k": 8, "num_warps": 1, "num_stages": 1}
    linears = [{**linear, "kind": k, "n": [8], "gain": gain, "config": tile} for k, gain in kinds.items()]
    linears.append({**linears[0], "kind": "linear", "gain": 1.1, "config": None})  # stock was faster
    adapter = {"inner": [8], "outer": [8], "ranks": [[1]], "dtype": "bfloat16", "adapters": "float32"}
    adapter |= {"layout": "t", "tokens": 1, "gain": 2.5}
    sections = {"attention": rows, "block_mm": linears, "lora": [adapter]}
    (own_tables / "cpu.json").write_text(json.dumps({**TABLE, **sections}))
    gains = {row["name"]: row["gains"] for row in run_json("list")["fusions"]}
    text = run("list")
    (file,) = run_json("env")["tables"]["files"]
    assert gains["attention"] == {"cpu": {"shapes": 4, "pays": 3, "median": 2.0, "best": 4.0}}
    assert "2.00x, up to 4.00x" in text
    assert gains["qkv"] == {"cpu": {"shapes": 2, "pays": 2, "median": pytest.approx(1.3), "best": 1.4}}
    assert gains["gated_mlp"]["cpu"]["best"] == 3.0 and gains["lora"]["cpu"]["best"] == 2.5
    assert gains["linear_epilogue"] == gains["stock_misfires"] == {}
    assert file["sections"] == {"attention": 4, "block_mm": 5, "lora": 1}


def test_list() -> None:
    found = run_json("list")["fusions"]
    assert [row["name"] for row in found] == [fusion.name for fusion in ALL]
    attention = found[0]
    assert attention["stage"] == "pre_grad" and attention["on"] is True
    assert attention["variable"] == "INDUCTOR_FUSIONS_ATTENTION"
    with config.patch(attention=False):
        assert run_json("list")["fusions"][0]["on"] is False
        assert "(off)" in run("list")
    with config.patch(lora=False):
        both = {row["name"]: row for row in run_json("list")["fusions"] if row["name"].startswith("lora")}
    assert {(row["on"], row["variable"]) for row in both.values()} == {(False, "INDUCTOR_FUSIONS_LORA")}


# -- explain --------------------------------------------------------------------------------------


def test_explain_callable(tiny: str) -> None:
    with config.patch(policy="always"):
        found = run_json("explain", f"{tiny}:make")
    (site,) = found["sites"]
    assert (site["fusion"], site["verdict"]) == ("attention", "fused")
    (group,) = found["groups"]
    assert group["count"] == 1 and group["kernel_or_reason"] == site["kernel"]
    assert "tiny_models.py" in group["source"]


def test_explain_says_why_not(tiny: str) -> None:
    with config.patch(policy="always"):
        text = run("explain", f"{tiny}:keeps_weights")
    assert "rejected" in text and "1 rejected" in text
    assert "tiny_models.py" in text


def test_explain_train(tiny: str) -> None:
    with config.patch(policy="always"):
        assert "1 fused" in run("explain", f"{tiny}:needs_grad", "--train")


def test_explain_leaves_no_compiled_code(tiny: str) -> None:
    run("explain", f"{tiny}:make")
    module: Any = sys.modules[tiny]
    model, kwargs = module.make()
    torch.testing.assert_close(torch.compile(model)(**kwargs), model(**kwargs))


def test_explain_folder(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    values = {
        "model_type": "bert", "vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 4,
        "num_attention_heads": 2, "intermediate_size": 32, "max_position_embeddings": 32,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(values))
    options = ("--attn", "eager", "--layers", "1", "--seq", "16", "--padded")
    with config.patch(policy="always"):
        found = run_json("explain", str(tmp_path), *options)
    attention = [site for site in found["sites"] if site["fusion"] == "attention"]
    assert [site["verdict"] for site in attention] == ["fused"]


def test_explain_page(tiny: str, tmp_path: Path) -> None:
    with config.patch(policy="always"):
        run("explain", f"{tiny}:make", "--html", "page.html")
    page = (tmp_path / "page.html").read_text()
    assert page.startswith("<!DOCTYPE html>") and "Attention: 1 fused" in page


def test_explain_model_type() -> None:
    """A model type of transformers, with its default configuration and random weights."""
    pytest.importorskip("transformers")
    with config.patch(policy="always"):
        found = run_json(
            "explain", "albert", "--layers", "1", "--seq", "8", "--attn", "eager", "--batch", "1"
        )
    verdicts = [site["verdict"] for site in found["sites"] if site["fusion"] == "attention"]
    assert verdicts == ["fused"]
    assert found["title"] == "AlbertModel" and found["facts"]["policy"] == "always"


def test_models_of_every_kind() -> None:
    """Layers that a configuration counts for itself; images in place of tokens; convolutions of any size."""
    transformers = pytest.importorskip("transformers")
    jamba = transformers.JambaConfig()
    models.shrink(jamba, 2)
    assert jamba.num_hidden_layers == 2 and len(jamba.layer_types) == 2

    def inputs(kind: str, name: str) -> set[str]:
        made = mock.Mock(config=transformers.CONFIG_MAPPING[kind](), main_input_name=name)
        return models.hugging_face_inputs(made, 1, 4, padded=False).keys()

    assert inputs("llava", "input_ids") == {"input_ids"}
    assert inputs("clip", "input_ids") == {"input_ids", "pixel_values"}
    assert inputs("bit", "pixel_values") == {"pixel_values"}


def test_explain_refuses_what_does_not_fit(monkeypatch: pytest.MonkeyPatch, refuse: Refuse) -> None:
    """With what to do, before anything is built."""
    pytest.importorskip("transformers")
    monkeypatch.setattr(os, "sysconf", lambda name: 1 << 10)
    assert "--layers 2" in refuse("explain", "BertConfig")


def test_explain_reports_a_model_that_does_not_run(tiny: str) -> None:
    done = CliRunner().invoke(cli.app, ["explain", f"{tiny}:wrong_shapes"])
    assert done.exit_code == 1
    assert done.stderr.count("\n") == 1 and "does not compile or run" in done.stderr


# -- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("arguments", "says"), [
    (["nonsense"], "No such command 'nonsense'. Valid commands: env, list, explain"),
    (["explain"], "MODEL"),
    (["explain", "NoSuchConfig"], "NoSuchConfig"),
    (["explain", "bert-base-uncased"], "bert-base-uncased"),
    (["explain", "BertConfig", "--attn", "fast"], "'--attn': 'fast' is not one of"),
    (["explain", "BertConfig", "--seq", "0"], "seq"),
    (["explain", "BertConfig", "--layers", "1", "--seq", "4096"], "512"),
    (["explain", "no_such_module:make"], "no_such_module"),
    (["explain", "tiny_models:nothing"], "nothing"),
    (["explain", "tiny_models:broken"], "first line second line"),
    (["explain", "tiny_models:only_a_model"], "must return"),
    (["explain", "."], "config.json"),
    (["list", "--yaml"], "yaml"),
    (["demo", "--device", "abacus"], "abacus"),
    (["demo", "--json", "no/such/folder.json"], "no/such"),
    (["explain", "tiny_models:make", "--html", "no/such/page.html"], "no/such"),
    (["explain", "tiny_models:make", "--html", "."], "is a folder"),
    (["explain", "tiny_models:make", "--no-cache"], "--no-cache is for models of Hugging Face"),
    (["explain", "tiny_models:make", "--seq", "128"], "--seq is for models of Hugging Face"),
    (["tune", "attention", "--budget", "-1"], "budget"),
    (["tune"], "tune needs a KIND: attention"),
], ids=lambda value: " ".join(value) if isinstance(value, list) else "")  # fmt: skip
def test_mistakes_are_one_line(arguments: list[str], says: str, tiny: str, refuse: Refuse) -> None:
    if arguments[-1] != "--yaml":
        pytest.importorskip("transformers")
    assert says in refuse(*arguments)


def test_a_file_that_may_not_be_written(tiny: str, monkeypatch: pytest.MonkeyPatch, refuse: Refuse) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    said = refuse("explain", f"{tiny}:make", "--html", "page.html")
    assert "--html: no permission to write page.html" in said


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_output_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A full disk is one line; a stdout that the caller has closed is none."""
    monkeypatch.setattr(sys, "argv", ["inductor-fusions", "list"])
    for stdout, code, lines in ((io.FileIO("/dev/full", "w"), 1, 1), (None, 0, 0)):
        monkeypatch.setattr(sys, "stdout", stdout and io.TextIOWrapper(stdout, write_through=True))
        with pytest.raises(SystemExit) as exit:
            cli.main()
        assert (exit.value.code or 0, capsys.readouterr().err.count("\n")) == (code, lines)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_no_cuda_device(refuse: Refuse) -> None:
    pytest.importorskip("transformers")
    assert "no CUDA device" in refuse("demo", "--device", "cuda")


def test_bad_environment_is_one_line() -> None:
    done = start("-m", "inductor_fusions", "list", INDUCTOR_FUSIONS_ATTENTION="maybe")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "inductor-fusions: INDUCTOR_FUSIONS_ATTENTION must be 0 or 1, not 'maybe'\n"


def test_module_runs_the_command_line() -> None:
    done = start("-m", "inductor_fusions", "env", "--json", INDUCTOR_FUSIONS="0")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["enabled"] is False
    toggle = next(t for t in found["toggles"] if t["name"] == "enabled")
    assert (toggle["value"], toggle["from"]) == (0, "environment")


@pytest.mark.parametrize(
    "command", [[], ["env"], ["list"], ["demo"], ["explain"], ["run"], ["bisect"]], ids=" ".join
)
def test_help_names_the_exit_codes(command: list[str]) -> None:
    assert "Exit codes" in run(*command, "--help")


def test_version() -> None:
    assert run("--version").strip() == inductor_fusions.__version__
