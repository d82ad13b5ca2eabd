"""Laws: properties that every encoding satisfies.

A law takes a ``Subject`` and raises ``LawBroken``. Each compares two computations of the same
result of a causal attention layer, without knowledge of the encoding.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterable
from weakref import ref

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from posenc.attention import LayerCache, attend
from posenc.errors import ArgumentError, BackendRefusal
from posenc.grid import Grid
from posenc.layout import Layout
from posenc.testing import backend_laws, input_laws
from posenc.testing.subject import (
    DIM,
    LENGTH,
    REGISTERED,
    LawBroken,
    Layer,
    Subject,
    agree,
    fold,
    inputs,
    law,
    learned,
    observed,
    operands,
    tokens_of,
)

MODULES = (backend_laws, input_laws)
"""Modules with further laws."""


def _full_pass(subject: Subject, layer: Layer, x: Tensor, tokens: Tensor | None = None) -> Tensor:
    tokens = tokens_of(*x.shape[:2]) if tokens is None else tokens
    output: Tensor = layer(x, subject.place(Layout.sequence(x.shape[1])), tokens=tokens)
    return output


@law
def cached_is_full(subject: Subject) -> None:
    """One token at a time with a cache equals one pass."""
    _in_chunks(subject, [1] * LENGTH)


@law
def chunked_is_full(subject: Subject) -> None:
    """Chunks of any size with a cache equal one pass."""
    _in_chunks(subject, [5, 1, 7])


def _in_chunks(subject: Subject, sizes: list[int]) -> None:
    layer, x, tokens, cache = subject.layer(), inputs(), tokens_of(), LayerCache()
    parts, start = [], 0
    for size in sizes:
        layout = subject.place(Layout.sequence(size, start))
        part = slice(start, start + size)
        parts.append(layer(x[:, part], layout, tokens=tokens[:, part], cache=cache))
        start += size
    agree("the output", torch.cat(parts, dim=1), _full_pass(subject, layer, x))


@law
def sharded_is_whole(subject: Subject) -> None:
    """Queries of the second half with all keys give the second half of the output."""
    encoding = subject.layer().encoding
    q, k, v = operands(LENGTH, LENGTH)
    layout = observed(subject, encoding, Layout.sequence(LENGTH))
    full = attend(q, k, v, Grid.of(layout, causal=True), encoding)
    half = Grid(layout.slice(6, LENGTH), layout, causal=True)
    part = attend(q[:, :, 6:], k, v, half, encoding)
    agree("the second half", part, full[:, :, 6:])


@law
def packed_is_separate(subject: Subject) -> None:
    """Documents packed into one row equal separate documents."""
    _is_alone(subject, Layout.packed([8, 5]), slice(0, 8), slice(8, LENGTH))


@law
def padded_is_unpadded(subject: Subject) -> None:
    """Rows padded on either side equal unpadded rows."""
    _is_alone(subject, Layout.padded([LENGTH, 8], side="left"), slice(LENGTH - 8, LENGTH))
    _is_alone(subject, Layout.padded([LENGTH, 8]), slice(0, 8))


def _is_alone(subject: Subject, layout: Layout, *parts: slice) -> None:
    """Require that parts of the second row are as without all other tokens."""
    layer, x, tokens = subject.layer(), inputs(), tokens_of()
    output = layer(x, subject.place(layout), tokens=tokens)
    for part in parts:
        alone = _full_pass(subject, layer, x[1:, part], tokens[1:, part])
        agree(f"tokens {part.start} to {part.stop} of {layout}", output[1:, part], alone)


@law
def hidden_tokens_change_nothing(subject: Subject) -> None:
    """Features of padding and of other documents have no effect."""
    _is_untouched(subject, Layout.padded([8, 8], LENGTH), slice(0, 8), by=slice(8, LENGTH))
    left = Layout.padded([8, 8], LENGTH, side="left")
    _is_untouched(subject, left, slice(LENGTH - 8, LENGTH), by=slice(0, LENGTH - 8))
    _is_untouched(subject, Layout.packed([5, 8]), slice(5, LENGTH), by=slice(0, 5))


@law
def causal_is_causal(subject: Subject) -> None:
    """Later tokens have no effect on earlier ones."""
    _is_untouched(subject, Layout.sequence(LENGTH), slice(0, 7), by=slice(7, LENGTH))


@law
def windows_are_windows(subject: Subject) -> None:
    """Tokens outside the sliding window have no effect on a query."""
    sequence = Layout.sequence(LENGTH)
    before, after = _is_untouched(
        subject, sequence, slice(8, LENGTH), by=slice(0, 5), layer=subject.layer(window=4)
    )
    if torch.allclose(before[:, 7], after[:, 7], atol=1e-9):
        raise LawBroken("the last token in the window makes no difference")


def _is_untouched(
    subject: Subject, layout: Layout, part: slice, *, by: slice, layer: Layer | None = None
) -> tuple[Tensor, Tensor]:
    """Require the same output at some tokens whatever others hold; returns both outputs."""
    layer, x = layer or subject.layer(), inputs()
    changed = x.clone()
    changed[:, by] = 100 * inputs(seed=5)[:, by]
    before, after = (layer(y, subject.place(layout), tokens=tokens_of()) for y in (x, changed))
    agree(f"tokens {part.start} to {part.stop} of {layout}", after[:, part], before[:, part])
    return before, after


@law
def nothing_kept_outlives_weights(subject: Subject) -> None:
    """Results kept by repeated calls are freed with the layer, and keep nothing of it alive."""
    layer, x = subject.layer(dtype=torch.float32), inputs().float()
    with torch.no_grad():
        for _ in range(3):
            _full_pass(subject, layer, x)
    tensors = (*layer.named_parameters(), *layer.named_buffers())
    references = {name: ref(x) for name, x in (*tensors, ("the encoding", layer.encoding))}
    del layer, tensors
    if any(x() is not None for x in references.values()):
        gc.collect()  # of cycles, if there are any
    alive = [name for name, x in references.items() if x() is not None]
    if alive:
        raise LawBroken(f"{', '.join(alive)} outlived the layer")


@law
def shift_is_as_claimed(subject: Subject) -> None:
    """A shift of all positions has no effect if and only if the encoding is relative."""
    layer, x, tokens = subject.layer(), inputs(), tokens_of()
    still = _full_pass(subject, layer, x)
    shifts = (37,) if "positions" in subject.claims.exceptions else (37, 5000)
    shifted = [layer(x, _shifted(subject, by), tokens=tokens) for by in shifts]
    if subject.claims.relative:
        for by, output in zip(shifts, shifted, strict=True):
            label = f"the output shifted by {by}"
            agree(label, output, still, tolerance=1e-5 * by)
    elif all(torch.allclose(output, still, atol=1e-6) for output in shifted):
        raise LawBroken("relative, but not claimed to be")


def _shifted(subject: Subject, by: int) -> Layout:
    if subject.axes == 1:
        return Layout.sequence(LENGTH, start=by)
    layout = subject.place(Layout.sequence(LENGTH))
    return layout.with_positions(layout.positions + by)


@law
def rows_are_independent(subject: Subject) -> None:
    """Batch rows at different positions equal separate calls."""
    layer, x, tokens = subject.layer(), inputs(), tokens_of()
    times = torch.stack([torch.arange(LENGTH), torch.arange(LENGTH) * 2 + 3]).float()
    both = layer(x, subject.place(Layout.at(times)), tokens=tokens)
    for row in (0, 1):
        layout = subject.place(Layout.at(times[row]))
        alone = layer(x[row : row + 1], layout, tokens=tokens[row : row + 1])
        agree(f"row {row}", both[row : row + 1], alone)


@law
def irregular_is_regular(subject: Subject) -> None:
    """Integer positions without ``start`` equal the regular layout."""
    layer, x, tokens = subject.layer(), inputs(), tokens_of()
    times = Layout.at(torch.arange(LENGTH).float())
    irregular = layer(x, subject.place(times), tokens=tokens)
    agree("the output", irregular, _full_pass(subject, layer, x))


@law
def empty_rows_are_zero(subject: Subject) -> None:
    """A query without visible keys gives zeros and finite gradients."""
    encoding = subject.layer().encoding
    q, k, v = (x.requires_grad_() for x in operands(4, 4))
    early = observed(subject, encoding, Layout.sequence(4))
    late = observed(subject, encoding, Layout.sequence(4, start=2))
    output = attend(q, k, v, Grid(early, late, causal=True), encoding)
    agree("queries without keys", output[:, :, :2], output[:, :, :2] * 0)
    gradients = torch.autograd.grad(output.square().sum(), (q, k, v))
    if not all(bool(gradient.isfinite().all()) for gradient in (output, *gradients)):
        raise LawBroken("a value or gradient is not finite")


@law
def gradients_are_right(subject: Subject) -> None:
    """Analytical gradients equal numerical ones, in float64."""
    layer, x = subject.layer(), inputs(1, 5).requires_grad_()
    layout = subject.place(Layout.at(torch.arange(5, dtype=torch.float64)))
    tokens = tokens_of(1, 5)

    def output(x: Tensor, *values: Tensor) -> Tensor:
        computed: Tensor = layer(x, layout, tokens=tokens)
        return computed

    try:
        torch.autograd.gradcheck(
            output, (x, *learned(layer.encoding)), fast_mode=True, atol=1e-4, rtol=1e-3
        )
    except RuntimeError as error:
        raise LawBroken(f"{error}") from error


@law
def single_precision_is_double(subject: Subject) -> None:
    """The output in float32 equals that in float64.

    At small and large positions, packed and padded.
    """
    narrow = subject.layer(dtype=torch.float32)
    wide = copy.deepcopy(narrow).double()
    x, tokens = inputs().float(), tokens_of()
    far = 0 if "positions" in subject.claims.exceptions else 5000
    # the error of an angle of 5000 radians is 5000 · 2^-24 in float32
    for label, layout, tolerance in (
        ("near the start", Layout.sequence(LENGTH), 2e-5),
        ("far out", Layout.sequence(LENGTH, start=far), 1e-3),
        ("packed", Layout.packed([8, 5]), 2e-5),
        ("padded", Layout.padded([LENGTH, 8], side="left"), 2e-5),
    ):
        placed = subject.place(layout)
        got = narrow(x, placed, tokens=tokens)
        if got.dtype != torch.float32:
            raise LawBroken(f"{got.dtype} returned for float32")
        exact = placed.with_positions(placed.positions.double())
        expected = wide(x.double(), exact, tokens=tokens)
        agree(label, got, expected, tolerance=tolerance)


@law
def half_precision_keeps_positions(subject: Subject) -> None:
    """In bfloat16 and under autocast, large positions are as exact as small ones.

    Positions in bfloat16 would collide from 257 on. The tolerance is that of rounded features.
    """
    start = 0 if "positions" in subject.claims.exceptions else 5000
    layout = subject.place(Layout.sequence(LENGTH, start=start))
    x = inputs().bfloat16()
    narrow = subject.layer(dtype=torch.bfloat16)
    wide = copy.deepcopy(narrow).double()
    expected = wide(x.double(), layout, tokens=tokens_of())
    got = narrow(x, layout, tokens=tokens_of())
    if got.dtype != torch.bfloat16:
        raise LawBroken(f"{got.dtype} returned for bfloat16")
    agree("bfloat16", got, expected, tolerance=0.06)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = copy.deepcopy(wide).float()(x.float(), layout, tokens=tokens_of())
    agree("autocast", mixed, expected, tolerance=0.06)


@law
def survives_saving(subject: Subject) -> None:
    """A state dict, a deep copy, and a model created on the meta device give the same output."""
    layer, x = subject.layer(), inputs()
    expected = _full_pass(subject, layer, x)
    agree("a deep copy", _full_pass(subject, copy.deepcopy(layer), x), expected)
    fresh = Layer(subject.make()).double().eval()
    fresh.load_state_dict(layer.state_dict())
    agree("a loaded state dict", _full_pass(subject, fresh, x), expected)
    with torch.device("meta"):
        on_meta = Layer(subject.make()).double().eval()
    on_meta = on_meta.to_empty(device="cpu")
    on_meta.load_state_dict(layer.state_dict())
    agree("a model from the meta device", _full_pass(subject, on_meta, x), expected)


ROWS, SHORT = 2, 6


@law
def second_derivatives_are_right(subject: Subject) -> None:
    """Second derivatives are those of the definition by every backend, which are numerical ones."""
    layer, x = subject.layer(), inputs(1, SHORT).requires_grad_()
    layout, tokens = subject.place(Layout.sequence(SHORT)), tokens_of(1, SHORT)
    inputs_of = [x, *learned(layer)]

    def penalty(backend: str) -> list[Tensor]:
        """Gradients of the squares of gradients."""
        layer.attention.backend = backend
        output: Tensor = layer(x, layout, tokens=tokens)
        first = torch.autograd.grad(output.sin().sum(), inputs_of, create_graph=True)
        squares = sum((gradient.square().sum() for gradient in first), x.new_zeros(()))
        return list(torch.autograd.grad(squares, inputs_of, materialize_grads=True))

    expected = penalty("reference")
    for backend in ("auto", "native", "sdpa", "blockwise"):
        try:
            gradients = penalty(backend)
        except BackendRefusal:
            continue
        for got, exact in zip(gradients, expected, strict=True):
            agree(backend, got, exact, tolerance=1e-11)
    layer.attention.backend = "auto"
    try:
        torch.autograd.gradgradcheck(
            lambda x: layer(x, layout, tokens=tokens), (x,), fast_mode=True, atol=1e-4, rtol=1e-3
        )
    except RuntimeError as error:
        raise LawBroken(f"{error}") from error


@law
def gradients_of_rows_are_separate(subject: Subject) -> None:
    """``vmap(grad)`` gives each batch row's gradients of all parameters, padded rows' too."""
    layer, x, tokens = subject.layer(), inputs(ROWS, SHORT), tokens_of(ROWS, SHORT)
    masks = torch.ones(ROWS, SHORT)
    masks[0, SHORT - 2 :] = 0
    parameters = {name: parameter.detach() for name, parameter in layer.named_parameters()}
    sequence = subject.place(Layout.sequence(SHORT))

    def loss(
        parameters: dict[str, Tensor], x: Tensor, tokens: Tensor, mask: Tensor | None
    ) -> Tensor:
        layout = sequence
        if mask is not None:
            layout = subject.place(Layout.from_attention_mask(mask.unsqueeze(0)))
        options = {"tokens": tokens.unsqueeze(0)}
        output: Tensor = torch.func.functional_call(
            layer, parameters, (x.unsqueeze(0), layout), options
        )
        return output.sin().sum()

    gradient = torch.func.grad(loss)
    for label, valid, axis in (("sequences", None, None), ("padded rows", masks, 0)):
        try:
            batched = torch.func.vmap(gradient, in_dims=(None, 0, 0, axis))(
                parameters, x, tokens, valid
            )
        except ArgumentError:  # positions that depend on the row, where a loop depends on them
            if valid is None:
                raise
            continue
        for row in range(ROWS):
            mask = None if valid is None else valid[row]
            for name, exact in gradient(parameters, x[row], tokens[row], mask).items():
                agree(f"{label}, {name}", batched[name][row], exact, tolerance=1e-5)


SIZES = ((2, LENGTH), (3, 21), (1, 2))
"""Batch sizes and lengths of comparisons; programs are traced with the first."""

LONGEST = 150
"""Maximum length of exported programs, which has more logits than the definition is chosen for."""


class Model(nn.Module):
    """A subject's layer with positions from 0."""

    def __init__(self, subject: Subject) -> None:
        super().__init__()
        self.layer: Layer = subject.layer(dtype=torch.float32)
        self.axes = subject.axes

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        layout = fold(Layout.sequence(x.shape[1], device=x.device), self.axes)
        output: Tensor = self.layer(x, layout, tokens=tokens)
        return output


def model_inputs(rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Inputs of a ``Model``."""
    return inputs(rows, length).float(), tokens_of(rows, length)


@law
def compiles_once(subject: Subject) -> None:
    """``torch.compile(fullgraph=True)`` gives the same, without recompilation for each length."""
    from torch._dynamo.testing import CompileCounter  # seconds to load, and no other law needs it

    model, counter = Model(subject), CompileCounter()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    for length in (LENGTH, 9, 21):
        arguments = model_inputs(2, length)
        agree(f"length {length}", compiled(*arguments), model(*arguments))
    if counter.frame_count != 1:
        raise LawBroken(f"{counter.frame_count} compilations for three lengths")


@law
def exports(subject: Subject) -> None:
    """``torch.export`` with dynamic batch and length gives a program with the same results."""
    model = Model(subject)
    with torch.no_grad():
        program = exported(model).module()
        for rows, length in SIZES:
            arguments = model_inputs(rows, length)
            agree(f"a batch of {rows} × {length}", program(*arguments), model(*arguments))


def exported(model: Model) -> torch.export.ExportedProgram:
    """The program of a model for batches and lengths of any size, up to ``LONGEST``."""
    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", min=2, max=LONGEST)}
    shapes = {"x": sizes, "tokens": sizes}
    return torch.export.export(model, model_inputs(*SIZES[0]), dynamic_shapes=shapes)


@law
def runs_without_values(subject: Subject) -> None:
    """Meta and fake tensors give the right shapes, without reading values."""

    def check(kind: str, device: str, model: Model) -> None:
        for layout in (
            Layout.sequence(LENGTH, device=device),
            Layout.packed([8, LENGTH - 8], device=device),
            Layout.packed([8, LONGEST - 8], device=device),
            Layout.padded([LENGTH, 8], device=device),
        ):
            x = torch.zeros(2, layout.length, DIM, device=device)
            tokens = torch.zeros(2, layout.length, dtype=torch.int64, device=device)
            output = model.layer(x, subject.place(layout), tokens=tokens)
            if output.shape != x.shape:
                raise LawBroken(f"{kind} tensors give {list(output.shape)}")

    try:
        model = Model(subject)
        with FakeTensorMode(allow_non_fake_inputs=True):
            check("fake", "cpu", model)
        check("meta", "meta", model.to("meta"))
    except (RuntimeError, NotImplementedError) as error:
        raise LawBroken(f"{error}") from error


LAWS = dict(sorted(REGISTERED.items()))
"""All laws by name."""


def certify(subject: Subject, *, only: Iterable[str] | None = None) -> dict[str, str]:
    """Check all laws, or those named in ``only``, except the exceptions that the subject claims.

    Returns:
        ``"kept"`` or the reason of the exception, by law.

    Raises:
        LawBroken: for the first violated law.
    """
    outcome = {}
    for name in LAWS if only is None else only:
        reason = subject.claims.exceptions.get(name)
        if reason is None:
            LAWS[name](subject)
        outcome[name] = "kept" if reason is None else reason
    return outcome
