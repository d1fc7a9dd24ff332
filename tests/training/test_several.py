"""Several adapters in one job: each equals its run alone bit for bit, whatever happens to the process in between."""

from __future__ import annotations

import io
import json
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.training.crash import Point, train_in_a_process
from tests.training.small import SEQUENCE, SEQUENCES, manifest, with_text
from tests.training.test_adapter import ADAPTER, bases  # noqa: F401
from tests.training.test_rows import answers, write_rows

from busbar.workloads.training.control import Control
from busbar.workloads.training.environment import run_from_manifest, run_from_pod
from busbar.workloads.training.errors import InvalidJob
from busbar.workloads.training.report import Lines
from busbar.workloads.training.run import run
from busbar.workloads.training.several import FINISHED, SeveralStatus, status_of

TEXT = {"uri": "pvc://text", "sequenceLength": SEQUENCE, "holdoutFraction": 0.2}
ROWS = {"uri": "pvc://questions/rows.jsonl", "sequenceLength": SEQUENCE, "holdoutFraction": 0.1}
ENTRIES: list[dict[str, Any]] = [
    {"name": "first", **ADAPTER, "dropout": 0.2},
    {"name": "rows", **ADAPTER, "rank": 2, "data": ROWS, "steps": 5, "seed": 7},
    {
        "name": "whole",
        "rank": 3,
        "dora": True,
        "merge": True,
        "batch": {"sequences": SEQUENCES * 2, "microBatch": SEQUENCES},
        "optimizer": {"learningRate": 1e-3, "schedule": "constant"},
        "steps": 6,
    },
]
NAMES = [entry["name"] for entry in ENTRIES]
OWN = ("data", "steps", "batch", "optimizer", "seed")


def job(entries: list[dict[str, Any]] | None = None, **changes: Any) -> dict[str, Any]:
    usual = {"model": {"uri": "pvc://bases/llama"}, "data": TEXT, "steps": 8, "evaluation": {}}
    given = manifest(**{**usual, "adapters": ENTRIES if entries is None else entries, **changes})
    del given["spec"]["engine"]["tokenizer"]
    return given


def alone(entry: dict[str, Any]) -> dict[str, Any]:
    """A job of its own for one of the adapters."""
    given = job()
    engine = given["spec"]["engine"]
    del engine["adapters"]
    engine |= {name: entry[name] for name in OWN if name in entry}
    engine["adapter"] = {name: value for name, value in entry.items() if name not in (*OWN, "name")}
    return given


@pytest.fixture(scope="module")
def claims(tmp_path_factory: pytest.TempPathFactory, bases: Path) -> Callable[[], Path]:  # noqa: F811
    """Makes a folder with the base and both texts."""
    whole = with_text(tmp_path_factory.mktemp("several") / "claims")
    write_rows(whole / "questions/rows.jsonl", answers(120))
    shutil.copytree(bases, whole / "bases")
    return lambda: Path(shutil.copytree(whole, tmp_path_factory.mktemp("claims") / "claims"))


def run_here(given: dict[str, Any], folder: Path) -> tuple[int, dict[str, Any], str]:
    described, log = run_from_manifest(given, folder, None, {}), io.StringIO()
    status = status_of(described)
    code = run(described, status, Control(), Lines("several", log))
    return code, status.to_json(), log.getvalue()


def result(folder: Path) -> dict[str, bytes]:
    """The files that an adapter, or a merged model with it, is loaded from; without the folder of the base."""
    names = ("adapter_model.safetensors", "adapter_config.json", "model.safetensors", "config.json")
    claims = str(folder).partition("/out/model")[0].encode()
    return {
        file.relative_to(folder).as_posix(): file.read_bytes().replace(claims, b"")
        for file in sorted(folder.rglob("*"))
        if file.name in names and "checkpoints" not in file.relative_to(folder).parts
    }


def losses(folder: Path) -> list[tuple[int, float]]:
    lines = (folder / "journal.jsonl").read_text().splitlines()
    found = {(line := json.loads(text))["step"]: line["loss"] for text in lines}
    return sorted(found.items())


@pytest.fixture(scope="module")
def expected(
    claims: Callable[[], Path],
) -> dict[str, tuple[dict[str, bytes], list[tuple[int, float]], Any, Any]]:
    """Of each adapter in a job of its own: files, losses, fingerprint, evaluation."""
    found = {}
    for entry in ENTRIES:
        folder = claims()
        code, status, log = run_here(alone(entry), folder)
        assert code == 0, log
        model = folder / "out/model"
        found[entry["name"]] = (
            result(model),
            losses(model / "checkpoints"),
            status["fingerprint"],
            status["evaluation"],
        )
    return found


def is_as_expected(folder: Path, expected: dict[str, Any]) -> None:
    for name, (files, steps, _, _) in expected.items():
        assert result(folder / "out/model" / name) == files, name
        assert losses(folder / "out/model/checkpoints" / name) == steps, name


def test_each_adapter_equals_its_job_alone_bit_for_bit(
    claims: Callable[[], Path], expected: dict[str, Any]
) -> None:
    folder = claims()
    code, status, log = run_here(job(), folder)
    assert code == 0, log
    is_as_expected(folder, expected)
    assert (status["phase"], status["step"], status["totalSteps"]) == ("Done", 19, 19)
    assert status["message"] == f"3 adapters are trained; they are in {folder / 'out/model'}"
    assert [(row["name"], row["step"], row["steps"], row["finished"]) for row in status["adapters"]] == [
        ("first", 8, 8, True),
        ("rows", 5, 5, True),
        ("whole", 6, 6, True),
    ]
    for row in status["adapters"]:
        _, steps, fingerprint, evaluation = expected[row["name"]]
        assert (row["loss"], row["fingerprint"]) == (steps[-1][1], fingerprint)
        assert row["evaluation"] == evaluation
    assert [step for step, _ in status["losses"]] == [14, 15, 16, 17, 18, 19]
    assert "adapter rows: " in log
    assert (folder / "out/model/whole/config.json").is_file(), "merged: the whole model"
    assert not (folder / "out/model/first/config.json").exists()

    again, status, log = run_here(job(), folder)
    assert again == 0
    assert log.count("is finished already") == 3
    assert (status["step"], status["checkpoint"]["step"], status["phase"]) == (19, 19, "Done")
    assert [row["fingerprint"] for row in status["adapters"]] == [each[2] for each in expected.values()]


KILLS = {
    "while the second trains": Point("trainer:Trainer", "step", 11),
    "before the first is written": Point("export", "export", 1),
    "before the second is written down": Point("several", "write_down", 2),
    "while the third prepares": Point("preparation", "prepare", 3),
}


@pytest.mark.parametrize("point", KILLS.values(), ids=KILLS.keys())
def test_a_killed_job_goes_on_with_the_adapter_at_which_it_was(
    point: Point, claims: Callable[[], Path], expected: dict[str, Any]
) -> None:
    folder = claims()
    assert train_in_a_process(job(), folder, point) == -signal.SIGKILL
    assert train_in_a_process(job(), folder) == 0
    is_as_expected(folder, expected)
    status = json.loads((folder / "status.json").read_text())
    assert (status["step"], status["phase"], status["replayMismatches"]) == (19, "Done", 0)


def test_a_stop_saves_and_is_gone_on_from(claims: Callable[[], Path], expected: dict[str, Any]) -> None:
    folder = claims()
    point = Point("trainer:Trainer", "step", 11, signal.SIGTERM)
    assert train_in_a_process(job(), folder, point) == 143
    status = json.loads((folder / "status.json").read_text())
    assert (status["step"], status["checkpoint"]["step"], status["totalSteps"]) == (11, 11, 19)
    assert [row["finished"] for row in status["adapters"]] == [True, False, False]
    code, status, log = run_here(job(), folder)
    assert code == 0, log
    assert "adapter rows: resumed from step 3; 0 finished steps were lost" in log
    is_as_expected(folder, expected)


def test_what_was_written_down_of_another_run_or_without_its_result_does_not_count(
    claims: Callable[[], Path],
) -> None:
    folder, entries = claims(), [{"name": "a", **ADAPTER, "steps": 4}, {"name": "b", **ADAPTER, "steps": 4}]
    given = job(entries, evaluation=None)
    assert run_here(given, folder)[0] == 0
    shutil.rmtree(folder / "out/model/a")
    (folder / "out/model/checkpoints/b" / FINISHED).write_text("{")
    code, status, log = run_here(given, folder)
    assert code == 0, log
    assert "is finished already" not in log
    given["spec"]["engine"]["adapters"][1]["steps"] = 5  # a finished one goes on
    code, status, log = run_here(given, folder)
    assert code == 0, log
    assert log.count("is finished already") == 1
    assert "adapter b: resumed from step 4" in log
    assert [row["step"] for row in status["adapters"]] == [4, 5]


def test_an_adapter_that_cannot_be_trained_ends_the_job_with_its_name_and_keeps_the_others(
    claims: Callable[[], Path],
) -> None:
    folder = claims()
    entries = [
        {"name": "good", **ADAPTER, "steps": 4},
        {"name": "bad", "targets": ["no_such_layer"], "steps": 4},
        {"name": "later", **ADAPTER},
    ]
    code, status, _ = run_here(job(entries, evaluation=None), folder)
    assert code == 2
    assert status["message"].startswith(
        "adapter bad (2 of 3): spec.engine.adapter.targets: no_such_layer matches"
    )
    assert status["phase"] == "Failed"
    assert [row["finished"] for row in status["adapters"]] == [True, False, False]
    assert (folder / "out/model/good/adapter_config.json").is_file()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "one and several": ({"adapter": ADAPTER}, "adapter is one, and adapters are several"),
    "no base": ({"model": {"config": {"model_type": "llama"}}}, "adapters need model.uri"),
    "frozen parts": ({"freeze": ["lm_head.*"]}, "all weights of the model are frozen already"),
    "equal names": ({"adapters": [ENTRIES[0], ENTRIES[0]]}, r"adapters\[1\]\.name: is first again"),
    "a long warm-up": (
        {"adapters": [{"name": "a", "steps": 2, "optimizer": {"warmupSteps": 3}}]},
        "an adapter's optimizer.warmupSteps must not exceed its steps",
    ),
    "the warm-up of all": (
        {"optimizer": {"warmupSteps": 3}, "adapters": [{"name": "a", "steps": 2}]},
        "an adapter's optimizer.warmupSteps must not exceed its steps",
    ),
    "none": ({"adapters": []}, "adapters"),
    "a corpus that does not exist": (
        {"adapters": [ENTRIES[0], {"name": "b", "data": {"uri": "builtin://nothing"}}]},
        r"spec\.engine\.adapters\[1\]\.data\.uri: there is no corpus builtin://nothing",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_before_anything_is_read(case: str, tmp_path: Path) -> None:
    changes, why = REFUSED[case]
    given = job()
    given["spec"]["engine"] |= {"tokenizer": {"train": {"vocabSize": 300}}} if case == "no base" else {}
    given["spec"]["engine"] |= changes
    with pytest.raises(InvalidJob, match=why):
        run_from_manifest(given, tmp_path, None, {})


def test_gangs_and_copies_in_memory_are_refused_for_several_adapters(tmp_path: Path) -> None:
    for field, value in (("shape", {"maxPods": 2}), ("checkpoint", {"memory": {"everySteps": 2}})):
        given = job()
        given["spec"][field] = value
        with pytest.raises(
            InvalidJob, match=r"engine\.adapters are trained in one process, without checkpoint\.memory"
        ):
            run_from_manifest(given, tmp_path, None, {})


def test_in_a_pod_each_adapter_has_its_folders_and_finds_its_own_text_by_its_address() -> None:
    environment = {
        "BUSBAR_SPEC": json.dumps(job()["spec"]["engine"]),
        "BUSBAR_OUTPUT_DIR": "/artifacts/out/model",
        "BUSBAR_CHECKPOINT_DIR": "/artifacts/out/model/checkpoints",
        "BUSBAR_DATA_DIR": "/artifacts/text",
        "BUSBAR_MODEL_DIR": "/artifacts/bases/llama",
        "BUSBAR_JOB_UID": "uid",
    }
    described = run_from_pod(environment)
    assert [part.part for part in described.parts] == NAMES
    assert [str(part.places.data) for part in described.parts] == [
        "/artifacts/text",
        "/artifacts/questions/rows.jsonl",
        "/artifacts/text",
    ]
    assert {str(part.places.model) for part in described.parts} == {"/artifacts/bases/llama"}
    assert [str(part.places.output) for part in described.parts] == [
        f"/artifacts/out/model/{n}" for n in NAMES
    ]
    assert {part.owner for part in described.parts} == {"uid"}
    assert len({part.threads for part in described.parts}) == 1


def test_before_the_first_adapter_begins_the_status_counts_nothing(tmp_path: Path) -> None:
    status = status_of(run_from_manifest(job(), tmp_path, None, {}))
    assert isinstance(status, SeveralStatus)
    said = status.to_json()
    assert (said["step"], said["totalSteps"], said["checkpoint"]) == (0, 19, None)
    assert [row["name"] for row in said["adapters"]] == NAMES
    assert b"busbar_training_steps 19.0" in status.to_prometheus()
    one = replace(run_from_manifest(job(), tmp_path, None, {}), parts=())
    assert not isinstance(status_of(one), SeveralStatus)
