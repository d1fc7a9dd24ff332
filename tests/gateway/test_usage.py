"""Usage is counted exactly once: on disk, across crashes, and with an API that is unavailable or loses answers."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.gateway.parts import PATIENCE_S

from busbar.gateway.accounts import Accounts
from busbar.gateway.errors import SpoolError, Unavailable
from busbar.gateway.inflight import InflightTable
from busbar.gateway.keys import ApiUnreachable
from busbar.gateway.spool import Record, Spool
from busbar.gateway.usage_recorder import UsageRecorder
from busbar.kube.contracts.usage import UsageRecord

WHO = {
    "requestId": "req-1",
    "keyId": "k",
    "tenant": "t",
    "namespace": "n",
    "service": "s",
    "model": "m",
}


def spool(folder: Path, segment_bytes: int = 200, limit_bytes: int = 100_000) -> Spool:
    return Spool(folder, segment_bytes=segment_bytes, limit_bytes=limit_bytes)


def records(*numbers: int) -> list[Record]:
    return [{"requestId": f"req-{n}", "promptTokens": n} for n in numbers]


def seqs(here: Spool) -> list[int]:
    return [record["seq"] for record in here.records()]


def test_records_are_numbered_from_one_and_found_again_after_a_restart(tmp_path: Path) -> None:
    here = spool(tmp_path)
    assert [r["seq"] for r in here.append(records(1, 2, 3))] == [1, 2, 3]
    identity = here.gateway_id
    here.close()
    again = spool(tmp_path)
    assert seqs(again) == [1, 2, 3]
    assert again.gateway_id == identity
    assert [r["seq"] for r in again.append(records(4))] == [4]


def test_numbers_go_on_when_everything_was_delivered_and_the_process_restarted(tmp_path: Path) -> None:
    here = spool(tmp_path)
    here.append(records(1, 2))
    here.acknowledge(2)
    here.close()
    assert not list(tmp_path.glob("*.ndjson"))
    again = spool(tmp_path)
    assert len(again) == 0
    assert [r["seq"] for r in again.append(records(3))] == [3]


def test_segments_go_when_all_in_them_was_taken(tmp_path: Path) -> None:
    here = spool(tmp_path, segment_bytes=50)
    for number in range(1, 5):
        here.append(records(number))
    assert len(list(tmp_path.glob("*.ndjson"))) == 4
    here.acknowledge(3)
    assert seqs(here) == [4]
    assert len(list(tmp_path.glob("*.ndjson"))) == 1
    assert here.bytes == sum(path.stat().st_size for path in tmp_path.glob("*.ndjson"))


def test_a_line_half_written_is_cut_off(tmp_path: Path) -> None:
    here = spool(tmp_path, segment_bytes=10_000)
    here.append(records(1, 2))
    here.close()
    (path,) = tmp_path.glob("*.ndjson")
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for length in range(first, len(whole)):
        path.write_bytes(whole[:length])
        again = spool(tmp_path)
        assert seqs(again) == [1], length
        again.close()
        assert path.read_bytes() == whole[:first]


def test_a_torn_last_line_with_its_newline_is_cut_off_too(tmp_path: Path) -> None:
    here = spool(tmp_path, segment_bytes=10_000)
    here.append(records(1, 2))
    here.close()
    (path,) = tmp_path.glob("*.ndjson")
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    assert seqs(spool(tmp_path)) == [1]


def test_damage_in_the_middle_is_refused_rather_than_skipped(tmp_path: Path) -> None:
    here = spool(tmp_path, segment_bytes=10_000)
    here.append(records(1, 2))
    here.close()
    (path,) = tmp_path.glob("*.ndjson")
    data = bytearray(path.read_bytes())
    data[12] ^= 1
    path.write_bytes(data)
    with pytest.raises(SpoolError, match="damaged at byte 0"):
        spool(tmp_path)


def test_one_folder_serves_one_process(tmp_path: Path) -> None:
    here = spool(tmp_path)
    with pytest.raises(SpoolError, match="held by another gateway"):
        spool(tmp_path)
    here.close()
    spool(tmp_path).close()


def test_a_full_disk_leaves_no_half_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = spool(tmp_path, segment_bytes=10_000)
    here.append(records(1))
    write = os.write

    def short(handle: int, data: Any) -> int:
        write(handle, bytes(data)[:7])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", short)
    with pytest.raises(SpoolError, match="free disk space"):
        here.append(records(2))
    monkeypatch.undo()
    assert [r["seq"] for r in here.append(records(2))] == [2]
    here.close()
    assert seqs(spool(tmp_path)) == [1, 2]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.one_of(st.integers(1, 3), st.just("ack"), st.just("restart")), max_size=25))
def test_whatever_happens_each_record_is_delivered_in_order_under_one_number(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int | str]
) -> None:
    folder = tmp_path_factory.mktemp("spool")
    here = spool(folder, segment_bytes=120)
    made, taken = 0, []
    for step in steps:
        if isinstance(step, int):
            here.append(records(*range(made + 1, made + 1 + step)))
            made += step
        elif step == "ack" and (batch := here.batch(2)):
            taken += [(r["seq"], r["requestId"]) for r in batch]
            here.acknowledge(batch[-1]["seq"])
        elif step == "restart":
            here.close()
            here = spool(folder, segment_bytes=120)
    assert here.oldest == next(here.records(), None)
    taken += [(r["seq"], r["requestId"]) for r in here.records()]
    assert taken == [(n, f"req-{n}") for n in range(1, made + 1)]
    here.close()


def test_counters_of_a_dead_process_are_found(tmp_path: Path) -> None:
    dead = InflightTable(tmp_path / "running", 4)
    dead.take(WHO).set(7, 3, 2)
    dead.take({**WHO, "requestId": "req-2"})
    heir = InflightTable(tmp_path / "running", 4)
    found = [(who["requestId"], who["promptTokens"], who["completionTokens"]) for _, who in heir.left_over()]
    assert sorted(found) == [("req-1", 7, 3), ("req-2", 0, 0)]
    assert heir.in_use == 2


def test_a_slot_with_damaged_words_is_dropped(tmp_path: Path) -> None:
    InflightTable(tmp_path / "running", 1).take(WHO)
    data = bytearray((tmp_path / "running").read_bytes())
    data[40] ^= 1
    (tmp_path / "running").write_bytes(data)
    heir = InflightTable(tmp_path / "running", 1)
    assert heir.left_over() == []
    heir.take(WHO)


def test_an_inflight_table_with_fewer_slots_than_before_still_finds_all(tmp_path: Path) -> None:
    dead = InflightTable(tmp_path / "running", 8)
    for number in range(8):
        dead.take({**WHO, "requestId": f"req-{number}"}).set(1, 1, 0)
    assert len(InflightTable(tmp_path / "running", 1).left_over()) == 8


def test_when_all_slots_are_taken_the_next_is_refused(tmp_path: Path) -> None:
    here = InflightTable(tmp_path / "running", 1)
    slot = here.take(WHO)
    with pytest.raises(SpoolError):
        here.take(WHO)
    here.free(slot.index)
    here.take(WHO)


class Api:
    """Accepts each usage record exactly once, as the contract says, and can be set to fail."""

    def __init__(self) -> None:
        self.taken: dict[tuple[str, int], Record] = {}
        self.away = False
        self.lose_answer = False
        self.shift = 0

    async def deliver(self, gateway: str, batch: list[Record]) -> int:
        if self.away:
            raise ApiUnreachable("away")
        for record in batch:
            UsageRecord.model_validate(record)
            self.taken.setdefault((gateway, record["seq"]), record)
        if self.lose_answer:
            raise ApiUnreachable("lost")
        return max(seq for name, seq in self.taken if name == gateway) + self.shift


def recorder(folder: Path, api: Api) -> UsageRecorder:
    return UsageRecorder(
        spool(folder),
        InflightTable(folder / "running", 4),
        api.deliver,
        Accounts(),
        batch=2,
        running_limit=4,
        retry_max_s=0.01,
        now=lambda: datetime(2026, 1, 1, tzinfo=UTC),
    )


def die(here: UsageRecorder) -> None:
    """The effect of SIGKILL on a process: its locks are released, and no cleanup runs."""
    for task in here._tasks:
        task.cancel()
    here._spool.close()


def use(here: UsageRecorder, number: int, prompt: int = 7, completion: int = 3, *, end: bool = True) -> None:
    usage = here.begin(**{**WHO, "requestId": f"req-{number}"})
    usage.set(prompt, completion)
    if end:
        usage.end()


async def test_usage_goes_from_the_request_to_the_api(tmp_path: Path) -> None:
    api = Api()
    here = recorder(tmp_path, api)
    here.start()
    for number in range(4):
        use(here, number)
    await here.stop(PATIENCE_S)
    assert sorted(r["requestId"] for r in api.taken.values()) == [f"req-{n}" for n in range(4)]
    assert {r["completionTokens"] for r in api.taken.values()} == {3}
    assert here.undelivered == 0


async def test_the_oldest_usage_ages_until_the_api_takes_it(tmp_path: Path) -> None:
    api = Api()
    api.away = True
    time = [datetime(2026, 1, 1, tzinfo=UTC)]
    here = UsageRecorder(
        spool(tmp_path), InflightTable(tmp_path / "running", 4), api.deliver, Accounts(),
        batch=2, running_limit=4, retry_max_s=0.01, now=lambda: time[0],
    )  # fmt: skip
    assert here.oldest_s == 0
    use(here, 1)
    time[0] += timedelta(minutes=2)
    assert here.oldest_s == 120, "also before it is on disk"
    await here._write()
    use(here, 2)
    time[0] += timedelta(minutes=3)
    assert here.oldest_s == 300
    with pytest.raises(ApiUnreachable):
        await here._ship()
    assert here.oldest_s == 300
    api.away = False
    await here._ship()
    assert here.oldest_s == 180
    await here.stop(PATIENCE_S)
    assert here.oldest_s == 0


async def test_a_request_that_got_nothing_is_not_a_record(tmp_path: Path) -> None:
    api = Api()
    here = recorder(tmp_path, api)
    use(here, 1, 0, 0)
    await here.stop(PATIENCE_S)
    assert api.taken == {}
    assert InflightTable(tmp_path / "running", 4).in_use == 0


async def test_while_the_api_is_away_usage_waits_on_disk_for_the_next_process(tmp_path: Path) -> None:
    api = Api()
    api.away = True
    here = recorder(tmp_path, api)
    here.start()
    use(here, 1)
    await here.stop(PATIENCE_S)
    assert len(api.taken) == 0
    api.away = False
    heir = recorder(tmp_path, api)
    heir.start()
    use(heir, 2)
    await heir.stop(PATIENCE_S)
    assert [r["requestId"] for _, r in sorted(api.taken.items())] == ["req-1", "req-2"]


async def test_a_lost_answer_of_the_api_does_not_double_usage(tmp_path: Path) -> None:
    api = Api()
    api.lose_answer = True
    here = recorder(tmp_path, api)
    use(here, 1)
    await here.stop(PATIENCE_S)
    assert len(api.taken) == 1
    api.lose_answer = False
    heir = recorder(tmp_path, api)
    await heir.stop(PATIENCE_S)
    assert len(api.taken) == 1
    assert heir.undelivered == 0


async def test_a_request_cut_off_by_the_gateways_death_is_counted_by_the_next(tmp_path: Path) -> None:
    api = Api()
    dead = recorder(tmp_path, api)
    use(dead, 1, 7, 2, end=False)
    die(dead)
    heir = recorder(tmp_path, api)
    await heir.stop(PATIENCE_S)
    assert [(r["promptTokens"], r["completionTokens"]) for r in api.taken.values()] == [(7, 2)]
    again = recorder(tmp_path, api)
    await again.stop(PATIENCE_S)
    assert len(api.taken) == 1


async def test_a_death_between_spool_and_slot_does_not_double_usage(tmp_path: Path) -> None:
    api = Api()
    dead = recorder(tmp_path, api)
    use(dead, 1, end=False)
    dead._spool.append(
        [{**WHO, "promptTokens": 7, "completionTokens": 3, "finishedAt": "2026-01-01T00:00:00Z"}]
    )
    die(dead)
    heir = recorder(tmp_path, api)
    await heir.stop(PATIENCE_S)
    assert len(api.taken) == 1
    assert InflightTable(tmp_path / "running", 4).in_use == 0


async def test_when_the_disk_refuses_a_write_requests_are_refused_and_usage_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = Api()
    here = recorder(tmp_path, api)

    def refuse(_: object) -> list[Record]:
        raise SpoolError("no space")

    with monkeypatch.context() as patch:
        patch.setattr(here._spool, "append", refuse)
        use(here, 1)
        with pytest.raises(SpoolError):
            await here._write()
        with pytest.raises(Unavailable, match="disk"):
            use(here, 2)
    await here.stop(PATIENCE_S)
    assert [r["requestId"] for r in api.taken.values()] == ["req-1"]


async def test_a_full_spool_refuses_requests(tmp_path: Path) -> None:
    here = UsageRecorder(
        spool(tmp_path, limit_bytes=100),
        InflightTable(tmp_path / "running", 4),
        Api().deliver,
        Accounts(),
        batch=2,
        running_limit=4,
        retry_max_s=1,
    )
    use(here, 1)
    await here._write()
    with pytest.raises(Unavailable):
        use(here, 2)


async def test_a_restored_state_folder_neither_doubles_nor_loses_usage(tmp_path: Path) -> None:
    """The API has records 1 to 3 of this gateway; the restored copy has only 1, so it continues under a new gateway
    id."""
    api = Api()
    old = recorder(tmp_path, api)
    use(old, 1)
    await old._write()
    die(old)
    copy = recorder(tmp_path, api)
    for seq in (1, 2, 3):
        api.taken[(copy._spool.gateway_id, seq)] = {"requestId": f"req-{seq}"}
    use(copy, 4)
    await copy.stop(PATIENCE_S)
    assert sorted(r["requestId"] for r in api.taken.values()) == ["req-1", "req-2", "req-3", "req-4"]
    assert len({gateway for gateway, _ in api.taken}) == 2


async def test_stopping_during_a_write_neither_loses_nor_doubles_usage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = Api()
    here = recorder(tmp_path, api)
    append, writing, go = here._spool.append, threading.Event(), threading.Event()

    def slow(batch: list[Record]) -> list[Record]:
        writing.set()
        go.wait(PATIENCE_S)
        return append(batch)

    monkeypatch.setattr(here._spool, "append", slow)
    here.start()
    use(here, 1)
    await asyncio.to_thread(writing.wait, PATIENCE_S)
    stopping = asyncio.create_task(here.stop(PATIENCE_S))
    await asyncio.sleep(0)
    go.set()
    await stopping
    assert len(api.taken) == 1
    heir = recorder(tmp_path, api)
    await heir.stop(PATIENCE_S)
    assert len(api.taken) == 1


async def test_slots_are_on_disk_before_a_record_leaves_the_spool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = recorder(tmp_path, Api())
    order: list[str] = []
    flush, acknowledge = here._inflight.flush, here._spool.acknowledge

    def flushing() -> None:
        order.append("flush")
        flush()

    def acknowledging(through: int) -> None:
        order.append("acknowledge")
        acknowledge(through)

    monkeypatch.setattr(here._inflight, "flush", flushing)
    monkeypatch.setattr(here._spool, "acknowledge", acknowledging)
    use(here, 1)
    await here.stop(PATIENCE_S)
    assert order == ["flush", "acknowledge"]


async def test_a_text_over_the_contracts_bound_is_cut(tmp_path: Path) -> None:
    api = Api()
    here = recorder(tmp_path, api)
    usage = here.begin(**{**WHO, "model": "m" * 1000})
    usage.set(1, 1)
    usage.end()
    await here.stop(PATIENCE_S)
    assert [len(r["model"]) for r in api.taken.values()] == [253]


async def test_impossible_token_counts_of_a_replica_do_not_block_other_usage(tmp_path: Path) -> None:
    api = Api()
    here = recorder(tmp_path, api)
    here.start()
    use(here, 1, prompt=2**70, completion=10**30)
    use(here, 2)
    await here.stop(PATIENCE_S)
    counted = [(r["promptTokens"], r["completionTokens"]) for r in api.taken.values()]
    assert counted == [(10**9, 10**9), (7, 3)]


def test_no_record_holds_more_than_the_contract_says() -> None:
    record = UsageRecord.model_validate(
        {**WHO, "seq": 1, "promptTokens": 1, "completionTokens": 1, "finishedAt": "2026-01-01T00:00:00Z"}
    )
    assert json.loads(json.dumps(record.to_wire()))["requestId"] == "req-1"


async def test_requests_in_hand_are_bounded_and_those_that_ended_do_not_count(tmp_path: Path) -> None:
    here = UsageRecorder(
        spool(tmp_path),
        InflightTable(tmp_path / "running", 8),
        Api().deliver,
        Accounts(),
        batch=2,
        running_limit=2,
        retry_max_s=1,
    )
    first = here.begin(**WHO)
    here.begin(**WHO)
    with pytest.raises(Unavailable, match="in hand"):
        here.begin(**WHO)
    first.end()
    first.end()
    here.begin(**WHO)
    with pytest.raises(Unavailable):
        here.begin(**WHO)
