"""A model's own normalisations, gated MLPs and rotary positions, each as one compiled pass on a CPU.

Nothing is looked up by name of architecture. A module is tried on random numbers: if one of the forms known here gives
what the module itself gives, that form takes its place, else the module stays. Modules keep what they had, so that the
model can be put back as it was.
"""

import inspect
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from kvscope.engine.packed_linears import HookFree, LinearPart, PackedLinear
from kvscope.kernels import cpu_layers

_OFFSETS = (0.0, 1.0)  # of a norm's weight: most models store the factor itself, Gemma what it differs from 1 by
_ROTATE = "apply_rotary_pos_emb"  # what every modelling file of transformers calls its rotation of Q and K
# What each was before: (the module that holds it, the attribute, its value).
Undo = list[tuple[nn.Module, str, Any]]


class FastNorm(HookFree):
    """An RMS norm; hands over to the module it stands for what it was not made for."""

    def __init__(self, own: nn.Module, epsilon: float, offset: float) -> None:
        super().__init__()
        self.weight: Any = own.weight
        self._own = [own]  # in a list: not a submodule
        self._epsilon, self._offset = epsilon, offset

    def forward(self, x: Tensor) -> Tensor:
        """`[..., size]` -> the same shape."""
        if x.dtype != self.weight.dtype or not x.is_contiguous():
            return self._own[0](x)  # type: ignore[no-any-return]
        return cpu_layers.rms_norm(x, self.weight, self._epsilon, self._offset)


class FastGatedMLP(HookFree):
    """`down(silu(gate(x)) * up(x))` over the model's own linear layers, without a detour over their hooks."""

    def __init__(self, own: nn.Module, gate: Any, up: Any, down: Any) -> None:
        super().__init__()
        self._own = [own]
        self.gate, self.up, self.down = gate, up, down

    def forward(self, x: Tensor) -> Tensor:
        """`[1, num_tokens, size]` -> the same shape; other shapes go to the module it stands for."""
        if x.dim() != 3 or len(x) != 1:
            return self._own[0](x)  # type: ignore[no-any-return]
        activated = cpu_layers.silu_and_multiply(self.gate.forward(x), self.up.forward(x))
        return self.down.forward(activated)  # type: ignore[no-any-return]


def speed_up(model: nn.Module) -> Undo:
    """Replace what one of the known forms is equal to. Mutates the model; returns what `restore` needs."""
    undo: Undo = []
    norms: dict[tuple[Any, ...], tuple[float, float] | None] = {}
    for parent, attribute, module in list(_children(model)):
        fast = _fast_norm(module, norms) or _fast_mlp(module)
        if fast is not None:
            undo.append((parent, attribute, module))
            setattr(parent, attribute, fast)
    for module in list(model.modules()):
        forward = _with_fast_rotation(module)
        if forward is not None:
            undo.append((module, "forward", None))
            module.forward = forward
    return undo


def restore(undo: Undo) -> None:
    """Put back what `speed_up` replaced. Mutates the model."""
    for module, attribute, own in reversed(undo):
        if own is None:
            delattr(module, attribute)
        else:
            setattr(module, attribute, own)


def _children(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    for parent in model.modules():
        for attribute, module in parent.named_children():
            yield parent, attribute, module


def _fast_norm(module: nn.Module, known: dict[tuple[Any, ...], tuple[float, float] | None]) -> FastNorm | None:
    """Its replacement, if it is an RMS norm; `known` has the form of each kind of module already tried."""
    weight = getattr(module, "weight", None)
    parameters = list(module.parameters())
    if not isinstance(weight, Tensor) or weight.dim() != 1 or len(parameters) != 1 or list(module.children()):
        return None
    numbers = sorted({value for value in vars(module).values() if isinstance(value, float) and 0 < value < 0.01})
    kind = (type(module), weight.shape, weight.dtype, *numbers)
    if kind not in known:
        forms = [(epsilon, offset) for epsilon in numbers for offset in _OFFSETS]
        size, dtype = weight.shape[0], weight.dtype
        known[kind] = next((form for form in forms if _equal(module, FastNorm(module, *form), size, dtype)), None)
    form = known[kind]
    return None if form is None else FastNorm(module, *form)


def _fast_mlp(module: nn.Module) -> FastGatedMLP | None:
    """Its replacement, if it is three linear layers around a gate."""
    linears = [child for child in module.children() if isinstance(child, nn.Linear | PackedLinear | LinearPart)]
    if len(linears) != 3 or any(True for _ in _other_parameters(module, linears)):
        return None
    dtype = next(module.parameters(), linears[0].weight).dtype
    for gate, up, down in ((0, 1, 2), (1, 0, 2)):
        fast = FastGatedMLP(module, linears[gate], linears[up], linears[down])
        if _equal(module, fast, linears[gate].weight.shape[1], dtype):
            return fast
    return None


def _other_parameters(module: nn.Module, linears: list[Any]) -> Iterator[nn.Parameter]:
    own = {id(parameter) for linear in linears for parameter in linear.parameters()}
    return (parameter for parameter in module.parameters() if id(parameter) not in own)


def _equal(module: nn.Module, fast: nn.Module, size: int, dtype: torch.dtype) -> bool:
    """Whether both give the same for rows of very different sizes."""
    if dtype not in cpu_layers.DTYPES:
        return False
    scales = torch.tensor([1e-4, 1e-2, 1, 30])[:, None]
    rows = (torch.randn(1, 4, size, generator=torch.Generator().manual_seed(0)) * scales).to(dtype)
    try:
        with torch.inference_mode():
            expected, found = module(rows), fast(rows)
    except (RuntimeError, TypeError, ValueError, AttributeError):
        return False
    return isinstance(expected, Tensor) and _close(found, expected)


def _close(found: Tensor, expected: Tensor) -> bool:
    """Equal but for the order of a sum, in each row: relative in norm."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    errors, sizes = (found.double() - expected.double()).norm(dim=-1), expected.double().norm(dim=-1)
    return bool((errors <= max(2e-6, torch.finfo(found.dtype).eps / 4) * sizes).all())


def _with_fast_rotation(module: nn.Module) -> Callable[..., Any] | None:
    """The module's own forward with another rotation of Q and K, if it calls one that is equal to ours."""
    own = inspect.unwrap(type(module).forward)
    if not isinstance(own, FunctionType) or _ROTATE not in own.__code__.co_names:
        return None
    rotate_both = _fast_rotation(own.__globals__.get(_ROTATE))
    if rotate_both is None:
        return None
    names = {**own.__globals__, _ROTATE: rotate_both}
    forward = FunctionType(own.__code__, names, own.__name__, own.__defaults__, own.__closure__)
    forward.__kwdefaults__ = own.__kwdefaults__
    return forward.__get__(module)


def _can_rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether `cpu_layers.rotate` reads these as they lie: elements of a head, and all angles, side by side."""
    angles = (1, q.shape[-2], q.shape[-1])
    return (
        q.shape[0] == k.shape[0] == 1
        and q.shape[-2:] == k.shape[-2:]
        and q.dtype == k.dtype == cos.dtype == sin.dtype
        and q.stride(-1) == k.stride(-1) == 1
        and cos.shape == sin.shape == angles
        and cos.is_contiguous()
        and sin.is_contiguous()
    )


def _fast_rotation(own: Any) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """The rotation of Q and K `[1, num_heads, num_tokens, size]`, if it is the common one."""

    def rotate_both(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: Any, **options: Any) -> Any:
        if more or options or not _can_rotate(q, k, cos, sin):
            return own(q, k, cos, sin, *more, **options)
        return cpu_layers.rotate(q, cos, sin), cpu_layers.rotate(k, cos, sin)

    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, heads, 5, 16, generator=generator) for heads in (4, 2))
    angles = torch.rand(2, 1, 5, 16, generator=generator)
    try:
        with torch.inference_mode():
            same = all(map(_close, rotate_both(q, k, *angles), own(q, k, *angles)))
    except (RuntimeError, TypeError, ValueError):
        return None
    return rotate_both if same else None
