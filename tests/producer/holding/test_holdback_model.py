"""Producer and readers against each other in every order: nobody waits for ever without being told, nothing is lost."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from lazyshard_producer.configuration.quantities import Amount
from lazyshard_producer.configuration.settings import Limits
from tests.producer.holding.holdback_world import Reader, World

PROPERTY = settings(deadline=None, database=None, derandomize=True, max_examples=150)

amounts = st.one_of(
    st.builds(Amount, number=st.integers(0, 12), unit=st.just("chunks")),
    st.builds(Amount, number=st.integers(0, 120), unit=st.just("samples")),
    st.builds(Amount, number=st.integers(0, 1200), unit=st.just("bytes")),
)
retention: Any = st.one_of(st.sampled_from(["all", "consumed"]), st.integers(1, 5))
sizes = st.lists(st.integers(1, 200), min_size=1, max_size=25)
turns = st.lists(st.integers(0, 3), max_size=60)


@st.composite
def readers(draw: st.DrawFn) -> list[Reader]:
    return [
        Reader(
            name=f"r{number}",
            window=draw(st.integers(1, 6)),
            every=draw(st.integers(1, 12)),
            keeps=draw(st.integers(1, 3)),
        )
        for number in range(draw(st.integers(1, 3)))
    ]


def room_for(reader: Reader) -> int:
    """The formula of docs/retention.md, in chunks."""
    return reader.keeps * reader.every + 2 * reader.window


@PROPERTY
@given(ahead=amounts, retain=retention, who=readers(), sizes=sizes, turns=turns, named=st.booleans())
def test_max_ahead_is_never_a_deadlock_whatever_its_value(
    ahead: Amount, retain: Any, who: list[Reader], sizes: list[int], turns: list[int], named: bool
) -> None:
    names = tuple(reader.name for reader in who) if named else ()
    world = World(Limits(max_ahead=ahead, retain=retain, consumers=names), who, sizes)
    world.run(turns)
    assert world.finished
    assert not any(hold.deadlock for hold in world.holds)


@PROPERTY
@given(
    who=readers(),
    retain=retention,
    sizes=sizes,
    turns=turns,
    disk=st.integers(1, 2000),
    ahead=st.none() | amounts,
    named=st.booleans(),
)
def test_max_disk_is_kept_and_a_deadlock_is_told_from_a_wait(
    who: list[Reader],
    retain: Any,
    sizes: list[int],
    turns: list[int],
    disk: int,
    ahead: Amount | None,
    named: bool,
) -> None:
    names = tuple(reader.name for reader in who) if named else ()
    world = World(Limits(max_ahead=ahead, max_disk=disk, retain=retain, consumers=names), who, sizes)
    # That nothing is published after a deadlock was told, and nothing beyond the limit, is checked at each step.
    world.run(turns)
    if world.finished:
        return
    assert world.hold is not None
    assert (world.hold.kind, world.hold.deadlock) == ("disk", True)
    assert world.hold.suggested is not None
    assert world.hold.suggested > disk


@PROPERTY
@given(who=readers(), sizes=sizes, turns=turns, capacity=st.integers(200, 2000), spare=st.integers(0, 200))
def test_min_free_disk_is_kept_and_a_deadlock_is_told_from_a_wait(
    who: list[Reader], sizes: list[int], turns: list[int], capacity: int, spare: int
) -> None:
    world = World(Limits(min_free_disk=spare, retain="consumed"), who, sizes, capacity=capacity)
    world.run(turns)
    if world.finished:
        return
    assert world.hold is not None
    assert (world.hold.kind, world.hold.deadlock) == ("free", True)


@PROPERTY
@given(who=readers(), last=st.none() | st.integers(1, 5), chunks=st.integers(1, 40), turns=turns)
def test_the_documented_room_is_enough(who: list[Reader], last: int | None, chunks: int, turns: list[int]) -> None:
    room = max(max(map(room_for, who)), (last or 1) + 1)
    limits = Limits(max_disk=100 * room, retain="consumed" if last is None else last)
    world = World(limits, who, [100] * chunks)
    world.run(turns)
    assert world.finished
    assert not any(hold.deadlock for hold in world.holds)


@PROPERTY
@given(who=readers(), turns=turns, disk=st.integers(2, 60))
def test_the_suggested_limit_lets_the_waiting_consumer_go_on(who: list[Reader], turns: list[int], disk: int) -> None:
    world = World(Limits(max_disk=10 * disk, retain="consumed"), who, [10] * 60)
    world.run(turns)
    if world.finished:
        return
    assert world.hold is not None and world.hold.suggested is not None and world.hold.needed is not None
    again = World(
        Limits(max_disk=world.hold.suggested, retain="consumed"),
        world.readers,
        [10] * 60,
        first=world.first,
        published=world.published,
    )
    with again.patched():
        while again.published < min(world.hold.needed, 60):
            assert again.produce(), again.hold


@PROPERTY
@given(who=readers(), turns=turns, chunks=st.integers(1, 40))
def test_a_consumer_that_leaves_no_reading_mark_needs_max_ahead_above_its_interval(
    who: list[Reader], turns: list[int], chunks: int
) -> None:
    for reader in who:
        reader.marks = False
    ahead = Amount(number=max(map(room_for, who)), unit="chunks")
    world = World(Limits(max_ahead=ahead, retain="consumed"), who, [10] * chunks)
    world.run(turns)
    assert world.finished


@PROPERTY
@given(who=readers(), turns=turns, dead_at=st.integers(0, 20), ahead=st.integers(0, 12))
def test_a_dead_consumer_keeps_its_chunks_and_holds_the_run_but_starves_nobody(
    who: list[Reader], turns: list[int], dead_at: int, ahead: int
) -> None:
    limits = Limits(max_ahead=Amount(number=ahead, unit="chunks"), retain="consumed")
    dead = Reader(name="dead", window=2, every=3, at=dead_at, checkpoints=list(range(3, dead_at + 1, 3)))
    dead.needs = needs = (dead_at // 2 + 1) * 2
    dead.alive = False
    world = World(limits, [dead], [10] * 60, published=dead_at)
    world.run(turns)
    assert world.published == needs + ahead
    assert world.hold is not None
    assert (world.hold.kind, world.hold.waits_for) == ("ahead", ("dead",))

    world.readers = [dead, *who]
    world.run(turns)
    assert all(reader.at == 60 for reader in who)
    assert world.first <= (dead.cursor or 0)
