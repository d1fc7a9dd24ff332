"""An engine's measurements of itself: the `report` in its `/status`, which fills cells of the performance table.

A report is untrusted input from a tenant, like all of `/status`; the operator decides which values it accepts. An
absent number was not measured yet. A report that cannot be parsed (from another version or a user's own image) counts
as absent, so that the rest of the status stays readable.
"""

from typing import Annotated, Any

from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator

from busbar.kube.contracts.wire import WireModel

Text = Annotated[str, Field(max_length=253)]
Count = Annotated[int, Field(ge=0, le=2**53)]
Amount = Annotated[float, Field(ge=0, le=1e15)]
Seconds = Annotated[float, Field(ge=-1e6, le=1e6)]
"""A fitted coefficient; noise can make it negative."""


def none_if_unreadable(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    """The value parsed by its model; None if it is invalid."""
    try:
        return handler(value)
    except ValidationError:
        return None


class CellReport(WireModel):
    """The cell of the table that a report is about."""

    workload_class: Text = Field(alias="class")
    accelerator: Text
    mode: Text = "resident"


class TrainingReport(CellReport):
    """Speed and memory of a training run; bytes are one process's."""

    tokens_per_second: Amount | None = None
    samples: Count = 0
    """Steps after warm-up from which the speed was measured."""
    offloaded_fraction: Annotated[float, Field(ge=0, le=1)] = 0.0
    planned_device_bytes: Count | None = None
    """The plan's prediction, made before anything was allocated."""
    peak_device_bytes: Count | None = None
    planned_host_bytes: Count | None = None
    peak_host_bytes: Count | None = None


class StepModelReport(WireModel):
    """Seconds of one step of a serving engine: a linear model of the step's content, fitted online."""

    seconds_per_step: Seconds
    seconds_per_sequence: Seconds
    seconds_per_thousand_context_tokens: Seconds
    seconds_per_prompt_token: Seconds
    rms_error_seconds: Amount
    steps: Count
    """Steps that the model was fitted to."""


class ServingReport(CellReport):
    """Speed and memory of one serving replica."""

    parameters: Count = 0
    active_parameters: Count | None = None
    """Those that a token is multiplied with: all, but for experts that it does not choose. None: not known."""
    weights_stored: Text = ""
    """As what the layers' matrices are kept: a float dtype, int8 or int4."""
    weight_bytes: Count = 0
    kv_stored: Text = ""
    """As what keys and values are kept."""
    kv_bytes: Count = 0
    kv_bytes_per_token: Count = 0
    kv_tokens: Count | None = None
    """What the cache holds, where it is known; else it follows from the bytes."""
    kv_block_tokens: Count = 0
    max_model_len: Count = 0
    preemptions: Count = 0
    attention: Text = ""
    batch_invariant: bool = False
    load_seconds: Amount = 0.0
    prefill_tokens_per_second: Amount | None = None
    decode_tokens_per_second: Amount | None = None
    guessed_tokens: Count = 0
    """Guesses of next tokens that were checked."""
    guessed_right: Count = 0
    drafted_tokens: Count = 0
    """Those of the guesses that a draft model made."""
    drafted_right: Count = 0
    draft_seconds: Amount = 0.0
    """That the draft model took for its guesses."""
    draft_weight_bytes: Count = 0
    """Beside `weight_bytes`."""
    draft_kv_bytes: Count = 0
    """Beside `kv_bytes`: one block for each block of the served model."""
    step_model: StepModelReport | None = None
    streamed_bytes: Count = 0
    """Of weights that memory does not hold: read in every step, of experts those that are chosen; 0: all stay."""
    stream_seconds: Amount = 0.0
    """Predicted at the start: reading them."""
    stream_bytes_per_second: Amount | None = None
    """In the last seconds of reading."""
    stream_is_slow: bool = False
    """It is under half of what was measured at the start."""
    expert_places: Count = 0
    """For experts that are read one by one; 0: none are. The counts below are since the weights were read."""
    expert_queries: Count = 0
    """Experts that a layer computed with, each once per step."""
    expert_hits: Count = 0
    """Those of them that were in memory when the layer asked."""
    expert_prefetches: Count = 0
    """Experts that were read ahead."""
    expert_prefetch_hits: Count = 0
    """Those of them that the layer then used."""
    expert_read_bytes: Count = 0

    @property
    def cache_tokens(self) -> int | None:
        """Tokens of context that the KV cache holds; None: not known."""
        if self.kv_tokens is not None:
            return self.kv_tokens or None
        return self.kv_bytes // self.kv_bytes_per_token if self.kv_bytes_per_token else None


MaybeTrainingReport = Annotated[TrainingReport | None, WrapValidator(none_if_unreadable)]
MaybeServingReport = Annotated[ServingReport | None, WrapValidator(none_if_unreadable)]
