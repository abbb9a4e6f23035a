"""Sweeps on the engine `local`: cells that are done are kept, others run, and every fault is one line."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from commands import quantkit, refused
from exporting import build_tiny

from quantkit import sweeps
from quantkit.errors import InputError
from quantkit.model.families import FAMILIES
from quantkit.runtime.machine.disk import LOCKS
from quantkit.sweeps.cell import TIMED
from quantkit.sweeps.results import RESULTS_FILE, sole_sweep
from quantkit.sweeps.run import sweep
from quantkit.workers.versions import installed_versions, require_versions

pytestmark = pytest.mark.once
OFF = {"accuracy": False, "latency": False, "memory": False}
INT8 = {"select": {"min_dim": 1}, "transforms": [], "measure": OFF}
WRONG = {**INT8, "select": {"min_dim": 1, "include": ["no_such_role"]}}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    row = FAMILIES["gpt2"]
    build_tiny(row.tiny_class, row.tiny).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def swept(model, tmp_path_factory):
    """A folder with a cell that is done and one that failed."""
    folder = tmp_path_factory.mktemp("swept") / "out"
    content = {"models": {"tiny": str(model)}, "recipes": {"int8": INT8, "wrong": WRONG}}
    return content, sweep(content, output=folder)


@pytest.fixture
def again(swept, tmp_path):
    """The content of a sweep, and a copy of its folder."""
    content, result = swept
    shutil.copytree(result.output, tmp_path / "out")
    return content, tmp_path / "out"


def attempts(result):
    return {row.recipe: (row.state, row.attempts) for row in result.rows}


def test_every_cell_is_an_artifact_or_an_error(swept):
    _, result = swept
    assert attempts(result) == {"int8": ("done", 1), "wrong": ("failed", 1)}
    done, failed = result.rows
    assert "no_such_role" in failed.error
    assert (result.output / done.folder / "model.onnx").exists()
    assert not (result.output / failed.folder).exists()
    document = json.loads((result.output / RESULTS_FILE).read_text())
    first, second = document["rows"]
    report = json.loads((result.output / done.folder / "report.json").read_text())
    assert first["figures"]["size_bytes"] == report["size"]["artifact_bytes"]
    assert "figures" not in second
    assert done.folder in (result.output / "sweep.html").read_text()


def test_done_and_failed_cells_are_kept_and_a_new_row_runs_alone(again):
    content, folder = again
    channel = {**INT8, "scheme": "int8_channel"}
    more = {**content, "recipes": {**content["recipes"], "channel": channel}}
    assert attempts(sweep(more, output=folder)) == {
        "int8": ("done", 1),
        "wrong": ("failed", 1),
        "channel": ("done", 1),
    }


def test_failed_cells_run_again_on_demand(again):
    content, folder = again
    assert attempts(sweep(content, output=folder, retry=True)) == {
        "int8": ("done", 1),
        "wrong": ("failed", 2),
    }


def test_a_damaged_artifact_is_made_again(again, swept):
    content, folder = again
    name = swept[1].rows[0].folder
    graph = folder / name / "model.onnx"
    whole = graph.read_bytes()
    graph.write_bytes(whole[:-1])
    assert attempts(sweep(content, output=folder))["int8"] == ("done", 2)
    assert graph.read_bytes() == whole


def test_the_key_covers_recipe_and_weights_but_no_place(swept, model, tmp_path):
    from quantkit.sweeps.grid import cells_of, check_sweep
    from quantkit.sweeps.run import planned_rows

    installed = installed_versions()

    def keys(folder, recipe=INT8, versions=installed):
        file = check_sweep({"models": {"tiny": str(folder)}, "recipes": {"int8": recipe}}, where="")
        return [row.key for row in planned_rows(file, cells_of(file, where=""), versions)]

    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    assert keys(model) == keys(copy) == [swept[1].rows[0].key]
    assert keys(model, {**INT8, "scheme": "int8_channel"}) != keys(model)
    assert keys(model, versions={**installed, "torch": "0"}) != keys(model)
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\7")
    assert keys(copy) != keys(model)


def test_other_versions_are_refused_by_name():
    with pytest.raises(
        InputError, match=r"host node7: other versions than the driver's: onnx .* instead of 0\.1"
    ):
        require_versions({**installed_versions(), "onnx": "0.1"}, host="node7")
    require_versions(installed_versions(), host="node7")


def test_timed_stages_are_stages_of_the_pipeline():
    package = Path(sweeps.__file__).parents[1]
    texts = [path.read_text(encoding="utf-8") for path in package.rglob("*.py")]
    stages = {name for text in texts for name in re.findall(r'progress\.stage\(\s*"([^"]+)"', text)}
    assert set(TIMED) <= stages


@pytest.fixture
def file(tmp_path, model):
    path = tmp_path / "table.yaml"
    path.write_text(json.dumps({"models": {"tiny": str(model)}, "recipes": {"int8": INT8, "wrong": WRONG}}))
    return path


def test_a_dry_run_counts_cells_and_writes_nothing(file, tmp_path, swept):
    folder = tmp_path / "none"
    ran = quantkit("sweep", str(file), "-o", str(folder), "--dry-run", "--json")
    assert ran.returncode == 1, "a cell would be refused"
    document = json.loads(ran.stdout)
    assert (document["count"], document["to_run"], document["kept"]) == (2, 2, 0)
    right, wrong = document["cells"]
    figures = swept[1].document["rows"][0]["figures"]
    assert right["num_bytes"] == pytest.approx(figures["size_bytes"], rel=0.05)
    assert "no_such_role" in wrong["error"]
    assert not folder.exists()


def test_the_command_ends_in_a_table_and_exit_code_1_for_a_failed_cell(file, swept):
    """All cells of the folder are known, so that nothing runs."""
    ran = quantkit("sweep", str(file), "-o", str(swept[1].output))
    assert ran.returncode == 1
    assert "2 cells: 1 done, 1 failed" in ran.stdout
    assert "tiny-wrong-cpu failed:" in ran.stdout
    assert "--retry" in ran.stdout


@pytest.mark.skipif(LOCKS is None, reason="no locks of files here")
def test_a_second_sweep_into_a_folder_is_refused(file, tmp_path):
    with sole_sweep(tmp_path / "out"):
        assert "another sweep writes this folder" in refused("sweep", str(file), "-o", str(tmp_path / "out"))


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (("--engine", "rya"), "did you mean 'ray'?"),
        (("--workers", "2"), "--engine ray"),
        (("--address", "auto"), "--engine ray"),
    ],
)
def test_a_refused_sweep_leaves_no_folder(flags, line, file, tmp_path):
    assert line in refused("sweep", str(file), "-o", str(tmp_path / "out"), *flags)
    assert not (tmp_path / "out").exists()
