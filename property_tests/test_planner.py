"""The knob's arithmetic, on steps of every kind: as much as asked, no more than needed, never less for more."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from fp8hooks.plan import CHOICES, EXACT, HOST, Plan
from fp8hooks.planner import Recorder, _choose
from fp8hooks.saved import Site

MIB = 1 << 20
ROLES = ("activation", "attention_qk", "attention_vo", "log_prob", "probability", "statistic")


@st.composite
def pieces(draw):
    """A step: pieces of memory, each with the saves that stand for it."""
    found = []
    for _ in range(draw(st.integers(1, 30))):
        size = draw(st.integers(1, 64)) * MIB // 8
        parts = draw(st.integers(1, 3))
        exact = draw(st.integers(0, 2)) == 0
        found.append((draw(st.sampled_from(ROLES)), size, parts, exact, draw(st.booleans()), draw(st.booleans())))
    return found


def record(step) -> Recorder:
    recorder = Recorder(None)
    held = set()
    for address, (role, size, parts, exact, int4, is_held) in enumerate(step):
        for _ in range(parts):
            save = recorder.number(Site("m", "op", role))
            if exact:
                recorder.exact(save, address, size, address, True)
            else:
                small = size // parts // 3 if int4 else None
                recorder.compressed(save, address, size, size // parts // 2, small, movable=True)
        if is_held:
            held.add(address)
    recorder.close(held.__contains__)
    return recorder


def replay(step, plan: Plan) -> tuple[int, int]:
    """Bytes on the device and the host under a plan, counted save by save."""
    recorder, device, host = Recorder(plan), 0, 0
    for role, size, parts, exact, _, _ in step:
        choices = [plan.of(recorder.number(Site("m", "op", role))) for _ in range(parts)]
        assert len(set(choices)) == 1
        stored = {EXACT: size, "codec": parts * (size // parts // 2), "int4": parts * (size // parts // 3)}
        if choices[0] == HOST:
            host += size if exact else stored["codec"]
        else:
            assert choices[0] == EXACT or not exact
            device += stored[choices[0]]
    return device, host


asked_shares = st.floats(0, 1)
budgets = st.integers(0, 64 * MIB)


@given(pieces(), asked_shares, st.booleans(), budgets)
def test_a_plan_gives_what_was_asked_or_all_it_can(step, asked: float, offload: bool, budget: int) -> None:
    recorder = record(step)
    plan = recorder.plan(asked, offload, budget)
    most = recorder.plan(1.0, offload, budget)
    assert plan.reached >= min(asked, most.reached)
    assert (plan.totals.device, plan.totals.host) == replay(step, plan)
    assert plan.totals.host <= (budget if offload else 0)
    assert plan.totals.original == recorder.original_bytes == sum(piece[1] for piece in step)
    assert set(plan.choices.values()) <= set(CHOICES)


@given(pieces(), asked_shares, asked_shares, st.booleans(), budgets)
def test_more_asked_never_gives_less(step, a: float, b: float, offload: bool, budget: int) -> None:
    recorder = record(step)
    less, more = (recorder.plan(asked, offload, budget).reached for asked in sorted((a, b)))
    assert less <= more


@given(pieces(), asked_shares, st.booleans())
def test_no_piece_is_changed_without_need(step, asked: float, offload: bool) -> None:
    """Leave out any one step that was taken last for its piece, and what was asked is missed."""
    recorder = record(step)
    plan = recorder.plan(asked, offload, 1 << 40)
    gains = [size - size // 2 for role, size, parts, exact, _, _ in step if not exact]
    if plan.reached > asked and any(choice != EXACT for choice in plan.choices.values()):
        over = (plan.reached - asked) * recorder.original_bytes
        largest = max([*gains, *(size for _, size, *_ in step)])
        assert over <= largest


@given(pieces(), asked_shares)
def test_eight_bits_come_before_the_host_and_the_host_before_four(step, asked: float) -> None:
    step = [(role, 8 * size, 1, False, True, False) for role, size, *_ in step]
    plan = record(step).plan(asked, True, 1 << 40)
    assert "int4" not in plan.choices.values()
    if "exact" in plan.choices.values():
        exact = sum(size for size, choice in zip(*per_piece(step, plan), strict=True) if choice == EXACT)
        moved = sum(size for size, choice in zip(*per_piece(step, plan), strict=True) if choice == HOST)
        # What is taken back at the end are small leftovers, never more than one step's gain.
        assert not moved or exact <= 2 * max(size for _, size, *_ in step)


def per_piece(step, plan: Plan) -> tuple[list[int], list[str]]:
    recorder = Recorder(plan)
    choices = [plan.of(recorder.number(Site("m", "op", role))) for role, *_ in step]
    return [size for _, size, *_ in step], choices


@given(pieces(), asked_shares, st.booleans(), budgets)
def test_a_plan_survives_json(step, asked: float, offload: bool, budget: int) -> None:
    plan = record(step).plan(asked, offload, budget)
    assert Plan.from_dict(plan.to_dict()) == plan
    assert record(step).plan(asked, offload, budget) == plan


def test_the_cheapest_of_all_plans_is_found_where_there_are_few() -> None:
    """On small steps, beside every combination of ways: within one step of the cheapest."""
    steps = [("activation", (3 + i) * MIB, 1, False, True, False) for i in range(3)]
    steps += [("attention_qk", 5 * MIB, 1, False, False, False), ("activation", 2 * MIB, 1, True, False, False)]
    recorder = record(steps)
    ways = [p.ways(p.before / recorder.original_bytes, True) for p in recorder._pieces.values()]
    for asked in (0.1, 0.3, 0.45, 0.6, 0.8, 0.95):
        needed = asked * recorder.original_bytes
        chosen = _choose([list(options) for options in ways], needed, 1 << 40)
        cost = sum(way.cost for way in chosen)
        best = min(
            sum(way.cost for way in combination)
            for combination in itertools.product(*ways)
            if recorder.original_bytes - sum(way.device for way in combination) >= needed
        )
        largest = max(way.cost for options in ways for way in options if way.choice != "int4")
        assert best <= cost <= best + largest
