"""FLOATER's solutions: steps against torchdiffeq, and how often the dynamics is evaluated."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torchdiffeq
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from posenc import Layout
from posenc.encodings.embedding import floater
from posenc.encodings.embedding.floater import SEGMENT, Floater, Method
from posenc.registry import create_layers
from tests.encodings.floaters import count_evaluations, make
from tests.support.exhaustive import in_turn

STAGES = 4


def blocks(count: int = 3, **options: Any) -> list[Floater]:
    """Blocks of a stack, with weights that matter."""
    torch.manual_seed(3)
    made = []
    for layer in create_layers("floater", layers=count, dim=6, **({"unit": 0.3} | options)):
        assert isinstance(layer.embedding, Floater)
        made.append(layer.embedding.double())
    with torch.no_grad():
        for parameter in torch.nn.ModuleList(made).parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
    return made


def at(begin: int, end: int) -> Tensor:
    return torch.arange(float(begin), float(end)).unsqueeze(0).double()


def fresh(block: Floater, times: Tensor) -> Tensor:
    """The path by a block of the same values that has solved nothing yet."""
    with torch.no_grad():
        return copy.deepcopy(block).path(times)


@pytest.mark.parametrize(
    ("options", "method"),
    in_turn(
        1,
        {
            "sinusoidal": {},
            "random": {"start": "random", "activation": "relu"},
            "odd": {"dim": 5, "step": 0.5},
            "single": {"dim": 1},
        },
        ["rk4", "midpoint", "euler"],
    ),
)
def test_fixed_steps_are_torchdiffeqs(method: Method, options: dict[str, Any]) -> None:
    """Values and gradients, before 0 and past the first segment."""
    encoding = make(method=method, noise=0.2, unit=0.1, **({"dim": 6} | options))
    parameters = list(encoding.parameters())
    step = encoding.flow.step
    field = partial(encoding.flow.slope, encoding.dynamics())
    pairs = []
    for sign in (1, -1):
        times = sign * step * torch.arange(70, dtype=torch.float64)
        solved = torchdiffeq.odeint(field, encoding.start, times, method=method)
        paths = (encoding.path(times.unsqueeze(0))[0], encoding.flow.rotated(solved, times))
        pairs += [(path, *torch.autograd.grad(path.sin().sum(), parameters)) for path in paths]
    for got, want in ((pairs[0], pairs[1]), (pairs[2], pairs[3])):
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-8)


def test_decoding_takes_one_step_of_the_solver_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """At any position, some in advance, for all blocks together."""
    stack = blocks()
    calls = count_evaluations(monkeypatch)
    with torch.no_grad():
        for length in (9, 200):
            for block in stack:
                block.path(at(0, length))
            calls.clear()
            for position in range(length, length + 70):
                for block in stack:
                    block.path(at(position, position + 1))
            assert len(calls) <= (70 + SEGMENT) * STAGES
    assert length == 200
    for block in stack:
        torch.testing.assert_close(block.path(at(250, 270)), fresh(block, at(250, 270)))


@pytest.mark.parametrize("graph", [True, False])
def test_a_stack_evaluates_as_often_as_one_block(
    graph: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = count_evaluations(monkeypatch)
    with torch.set_grad_enabled(graph):
        for count in (1, 4):
            for _ in range(2 if graph else 1):
                calls.clear()
                paths = [block.path(at(-3, 90)).sum() for block in blocks(count)]
                assert len(calls) == (3 + 89) * STAGES
                if graph:
                    torch.stack(paths).sum().backward()  # type: ignore[no-untyped-call]
                    assert len(calls) == 2 * (3 + 89) * STAGES  # each segment once more


def _gradients(stack: list[Floater], run: Callable[[], None]) -> list[Tensor | None]:
    parameters = list(torch.nn.ModuleList(stack).parameters())
    for parameter in parameters:
        parameter.grad = None
    run()
    return [parameter.grad for parameter in parameters]


def test_blocks_solved_together_have_the_gradients_of_blocks_alone() -> None:
    """However their backward passes are ordered, and with activations computed again."""
    stack, times = blocks(), at(0, 20)
    shared = stack[0].solutions

    def alone() -> None:
        for block in stack:
            block.solutions = floater.Solutions([block])
            block.path(times).sin().sum().backward()  # type: ignore[no-untyped-call]
        for block in stack:
            block.solutions = shared

    def together() -> None:
        sum(block.path(times).sin().sum() for block in stack).backward()  # type: ignore[union-attr]

    def forward_first() -> None:
        for loss in [block.path(times).sin().sum() for block in stack]:
            loss.backward()  # type: ignore[no-untyped-call]

    def one_by_one() -> None:
        for block in stack:
            block.path(times).sin().sum().backward()  # type: ignore[no-untyped-call]

    def again(reentrant: bool) -> None:
        x = torch.zeros(1, 20, 6, dtype=torch.float64, requires_grad=True)
        layout = Layout.at(times)
        losses = [
            checkpoint(block, x, layout, use_reentrant=reentrant).sin().sum() for block in stack
        ]
        sum(losses).backward()  # type: ignore[union-attr]

    wanted = _gradients(stack, alone)
    assert all(gradient is not None for gradient in wanted)
    for run in (together, forward_first, one_by_one, lambda: again(False), lambda: again(True)):
        for _ in range(2):
            torch.testing.assert_close(_gradients(stack, run), wanted)


@pytest.mark.parametrize("method", ["rk4", "dopri5"])
def test_nothing_stored_outlives_the_values_it_was_solved_for(method: Method) -> None:
    stack, times = blocks(2, method=method, tolerance=0.1, unit=0.1), at(0, 3)

    def check() -> None:
        for block in stack:
            with torch.no_grad():
                torch.testing.assert_close(block.path(times), fresh(block, times))
            torch.testing.assert_close(block.path(times).detach(), fresh(block, times))

    check()
    with torch.no_grad():
        stack[1].start.add_(0.5)
    check()
    stack[0].dynamics.first_weight.data.mul_(1.5)
    check()
    stack[0].dynamics.second_bias = torch.nn.Parameter(torch.ones(6, dtype=torch.float64))
    check()
    torch.nn.ModuleList(stack).bfloat16()
    check()
    whole = torch.nn.ModuleList(stack)
    whole.load_state_dict(
        {name: torch.ones_like(value) for name, value in whole.state_dict().items()}
    )
    check()
    stack[1].dynamics = copy.deepcopy(stack[1].dynamics)
    with torch.no_grad():
        stack[1].dynamics.first_bias.add_(1.0)
    check()


def test_copies_solve_together_and_store_nothing_of_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stack = torch.nn.ModuleList(blocks())
    names = list(stack.state_dict())
    before = pickle.dumps(stack)
    with torch.no_grad():
        for block in stack:
            block.path(at(0, 300))  # type: ignore[operator]
    assert list(stack.state_dict()) == names
    assert len(pickle.dumps(stack)) == len(before)
    calls = count_evaluations(monkeypatch)
    for other in (copy.deepcopy(stack), pickle.loads(before)):
        calls.clear()
        with torch.no_grad():
            for block in other:
                block.path(at(0, 9))
        assert len(calls) == 8 * STAGES


def test_inference_mode_threads_and_gradients_take_turns() -> None:
    stack, times = blocks(), at(0, 30)
    wanted = [fresh(block, at(0, 40)) for block in stack]
    with torch.inference_mode():
        for block in stack:
            block.path(times)
    for _ in range(2):
        for block, path in zip(stack, wanted, strict=True):
            with torch.no_grad():
                torch.testing.assert_close(block.path(at(0, 40)), path)
            block.path(at(0, 40)).sum().backward()  # type: ignore[no-untyped-call]
    failed = []

    def decode(begin: int) -> None:
        for position in range(begin, begin + 10):
            for block, path in zip(stack, wanted, strict=True):
                with torch.no_grad():
                    got = block.path(at(position, position + 1))
                if not torch.allclose(got, path[:, position : position + 1]):
                    failed.append(position)

    threads = [threading.Thread(target=decode, args=(begin,)) for begin in (0, 10, 20, 30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
