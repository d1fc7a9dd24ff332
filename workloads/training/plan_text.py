"""What `busbar plan` says to a person."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def as_text(answer: Mapping[str, Any]) -> str:
    """The answer as lines that a person reads."""
    from busbar.workloads.training import longest
    from busbar.workloads.training.settings import WITHIN
    from busbar.workloads.training.streamed_plan import PARAMETER_OFFLOAD

    rows = [
        f"{answer['parameters'] / 1e6:,.1f} million parameters{_trained(answer)} on {answer['accelerator']}, "
        f"device {_size(answer['deviceBytes'])}, host {_size(answer['hostBytes'])}",
        f"{'mode':<19} {'fits':<5} {'device':>11} {'host':>11} {'state on host':>14} {'activations':>12} {'s per step':>11} {'tokens/s':>10}",
    ]
    for name, mode in answer["modes"].items():
        rows.append(_row(f"{name}{' *' if name == answer['mode'] else ''}", mode))
    rows.append("* the job's mode. Speeds are predicted from data sheets and not measured.")
    rows.append(_activations(answer["activations"]))
    if answer["logits"]["tiledBytes"] < answer["logits"]["wholeBytes"]:
        rows.append(_logits(answer["logits"]))
    if answer["mlp"]["tiledBytes"] < answer["mlp"]["wholeBytes"]:
        rows.append(_mlp(answer["mlp"]))
    if answer["packing"]["asked"] == WITHIN:
        rows.append(
            f"Documents are kept apart by a mask, which takes {_size(answer['packing']['maskBytes'])} of them, the same for all "
            "blocks: it grows with the square of data.sequenceLength."
        )
    if len(set(answer["state"]["bytes"].values())) > 1:
        rows.append(_state(answer["state"]))
    if answer["hidingTokens"] and answer["modes"][PARAMETER_OFFLOAD]["fits"]:
        rows.append(
            f"In {PARAMETER_OFFLOAD} a micro-batch of {answer['hidingTokens']:,} tokens hides the link to the host."
        )
    rows += _gang(answer)
    if answer["adapter"] is not None:
        rows.append(
            "Speeds and activations are those of training all weights; an adapter needs less of both."
        )
    if answer["freeze"]:
        rows.append("Activations are those of training all weights; with frozen ones they are less.")
    if answer["unknownPatterns"]:
        rows.append(
            f"What {', '.join(answer['unknownPatterns'])} matches is not known without the model, and counts as trained; "
            "the engine reads the model itself."
        )
    rows += [*_fixes(answer), *_files(answer)]
    if "longest" in answer:
        rows += longest.as_text(answer)
    return "\n".join(rows)


def _gang(answer: Mapping[str, Any]) -> list[str]:
    """Whose memory it is, where several processes share the run."""
    from busbar.workloads.training.gang_plan import exchange_as_text
    from busbar.workloads.training.plan import DIVIDED

    rows = []
    processes = answer["pods"] * answer["processesPerPod"]
    if processes > 1:
        each = f" with {answer['processesPerPod']} processes each" if answer["processesPerPod"] > 1 else ""
        which = f"{answer['pods']} pod{'s' if answer['pods'] > 1 else ''}{each}"
        rows.append(f"Memory is that of one process of {which}: they divide {DIVIDED[answer['sharding']]}.")
        rows += exchange_as_text(answer)
    if answer["processesPerSequence"] > 1:
        rows.append(
            f"{answer['processesPerSequence']} processes share each sequence, and activations are those of their part."
        )
    return rows


def _fixes(answer: Mapping[str, Any]) -> list[str]:
    """With what the modes would fit that do not."""
    rows = []
    for name, mode in answer["modes"].items():
        if not mode["fits"] and name == answer["mode"]:
            rows += [
                f"{mode['why']}. What would help:",
                *(f"  {fix}" for fix in mode["fixes"] or ["mode: auto"]),
            ]
        elif own := [fix for fix in mode.get("fixes", ()) if not fix.startswith("mode:")]:
            rows.append(f"{name} would fit with {own[0]}")
    return rows


def _files(answer: Mapping[str, Any]) -> list[str]:
    """What the job's mode keeps on disk, of checkpoints, and of copies of them in memory."""
    chosen = answer["modes"][answer["mode"]]
    if not chosen["fits"]:
        return []
    rows = []
    if on_disk := chosen["plan"]["diskBytes"]:
        seconds = chosen["diskSecondsPerStep"]
        time = (
            "a time that the prediction leaves out; --disk says how long it is"
            if seconds is None
            else f"{seconds:.3g} s if nothing hides them, on top of the predicted ones"
        )
        rows.append(
            f"{_size(on_disk)} of state are on disk: each step reads them and writes them back, in {time}."
        )
    durable = chosen["checkpointSeconds"]
    written = "" if durable is None else f", which the disk takes in {durable:.3g} s"
    rows.append(f"A checkpoint has {_size(chosen['plan']['checkpointBytes'])}{written}.")
    rows.append(
        f"Beside the checkpoints its tokens take up to {_size(answer['tokenBytes'])}, and no more than the text has."
    )
    if chosen["checkpointBlocks"]:
        rows.append(
            "The host has no room for a snapshot of it: an update waits where the disk has not kept up with it."
        )
    if (parity := answer["memoryParity"]) is not None:
        lost = f", and {parity} of {answer['pods']} pods may be lost" if answer["pods"] > 1 else ""
        held = _size(chosen["plan"]["host"]["copies"])
        rows.append(f"Copies of it in memory (checkpoint.memory) take {held} of a process's host{lost}.")
    return rows


def _activations(answer: Mapping[str, Any]) -> str:
    kept, recomputed = _size(answer["keptBytes"]), _size(answer["recomputedBytes"])
    swapped, on_host = _size(answer["swappedBytes"]), _size(answer["onHostBytes"])
    return (
        f"Activations (now {answer['asked']}) take {kept} if they are kept, and {recomputed} if they are recomputed, with "
        f"{answer['computeRatio']:.2f} times the computation; swapped as well, {swapped} and {on_host} of the host."
    )


def _state(answer: Mapping[str, Any]) -> str:
    sizes = ", ".join(f"{_size(size)} {name}" for name, size in answer["bytes"].items())
    return f"The optimizer's state (now {answer['asked']}) takes {sizes} in all; formats other than exact change the numbers."


def _logits(answer: Mapping[str, Any]) -> str:
    whole, tiled = _size(answer["wholeBytes"]), _size(answer["tiledBytes"])
    return (
        f"Of them logits (now {answer['asked']}) take {whole} at the end of the forward pass as a whole, and {tiled} tiled, with "
        f"{answer['computeRatio']:.2f} times the computation and other roundings."
    )


def _mlp(answer: Mapping[str, Any]) -> str:
    whole, tiled = _size(answer["wholeBytes"]), _size(answer["tiledBytes"])
    return (
        f"The inside of one block takes up to {whole} with its MLP (now {answer['asked']}) as a whole, and {tiled} tiled, with "
        f"{answer['computeRatio']:.2f} times the computation and other roundings."
    )


def _trained(answer: Mapping[str, Any]) -> str:
    what = answer["adapter"] or ("frozen: " + ", ".join(answer["freeze"]) if answer["freeze"] else None)
    if what is None:
        return ""
    return f", of which {answer['trainableParameters'] / 1e6:,.2f} million are trained ({what}),"


def _row(name: str, mode: Mapping[str, Any]) -> str:
    """The memory of a mode that does not fit is that of the layout which exceeds its limits by the least."""
    made, fits = mode["plan"], "yes" if mode["fits"] else "no"
    if made is None:
        return f"{name:<19} {fits:<5} {mode['why'].partition(': ')[2]}"
    speed = f"{mode['secondsPerStep']:>11.3g} {mode['tokensPerSecond']:>10,.0f}" if mode["fits"] else ""
    return (
        f"{name:<19} {fits:<5} {_size(made['deviceBytes']):>11} {_size(made['hostBytes']):>11} "
        f"{made['offloadedFraction']:>14.0%} {made['activations']:>12} {speed}"
    ).rstrip()


def _size(size: int | None) -> str:
    if size is None:
        return "not limited"
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
