"""How far every backend is from attention in float64, relative in norm, over hundreds of shapes.

    python tests/kernels/test_error.py        one table: the largest error by backend and element type

Everything outside the contexts is NaN: unwritten slots, and blocks of nobody. Shapes are drawn with a fixed seed. The
Triton kernels run in the interpreter where there is no GPU, with tiles as small as a GPU's and with splits.
"""

import random
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import pytest
import torch
from paged_case import build_case

from kvscope.kernels.backend import AttentionBackend, get_backend
from kvscope.kernels.triton_tiles import Splits, Tiles

NUM_SHAPES = 320
STRIDE = 4  # the test takes every fourth of them, the table all
LIMITS = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 5e-3}
BACKENDS = ("torch", "triton", "numba")
NUMBA_HEADS = ((64, 64, 3), (20, 48, 2))  # each pair of head sizes costs a compilation


class Shape(NamedTuple):
    """One step, and how it is computed."""

    query_lengths: list[int]
    context_lengths: list[int]
    sizes: dict[str, Any]
    sliding_window: int | None
    soft_cap: float | None
    num_splits: int

    @property
    def heads(self) -> tuple[int, int, int]:
        return self.sizes["head_size"], self.sizes["value_head_size"], self.sizes["group_size"]


def draw_shapes(count: int = NUM_SHAPES, seed: int = 20230901) -> Iterator[Shape]:
    """Decodes, prefills, chunks and mixed steps; every block size that the kernels take, heads of any size."""
    draw = random.Random(seed)
    for index in range(count):
        num_seqs = draw.randint(1, 4)
        contexts = [draw.choice((1, 2, 15, 16, 17, draw.randint(3, 90))) for _ in range(num_seqs)]
        phase = draw.choice(("decode", "prefill", "mixed"))
        most = {"decode": [1] * num_seqs, "prefill": contexts, "mixed": [draw.randint(1, n) for n in contexts]}
        if index % 8 == 0:
            head_size, value_head_size, group_size = draw.choice(NUMBA_HEADS)
        else:
            head_size, group_size = draw.choice((8, 16, 20, 32, 48, 64, 80, 96, 128)), draw.choice((1, 2, 3, 4, 5, 8))
            value_head_size = draw.choice((head_size, head_size, 16, 24))
        yield Shape(
            most[phase],
            contexts,
            {
                "block_size": 1 << draw.randint(0, 8),
                "num_kv_heads": draw.choice((1, 2)),
                "head_size": head_size,
                "value_head_size": value_head_size,
                "group_size": group_size,
                "dtype": draw.choice((torch.float32, torch.float32, torch.float16, torch.bfloat16)),
            },
            draw.choice((None, None, 1, 7, 16, 40)),
            draw.choice((None, None, 2.0, 30.0)),
            draw.choice((1, 2, 8)),
        )


def backend_for(name: str, shape: Shape) -> AttentionBackend | None:
    """None where a backend would have to compile for this shape alone."""
    if name == "numba":
        return get_backend("numba") if shape.heads in NUMBA_HEADS else None
    if name == "triton":
        from kvscope.kernels.triton_backend import TritonBackend

        return TritonBackend(Tiles(block_m=16, tile=32), Splits(shape.num_splits, 64), by_phase=True)
    return get_backend(name)


def relative_error(backend: AttentionBackend, shape: Shape) -> float:
    """Norm of the error over the norm of what is right; NaN where anything outside of a context was read."""
    case = build_case(shape.query_lengths, shape.context_lengths, **shape.sizes)
    variant = {"sliding_window": shape.sliding_window, "soft_cap": shape.soft_cap}
    output = backend.attention(case.query, case.key_cache, case.value_cache, case.batch, scale=case.scale, **variant)
    expected = case.expected(**variant)
    return float((output.double() - expected).norm() / expected.norm())


@pytest.mark.slow
@pytest.mark.parametrize("name", BACKENDS)
def test_no_shape_is_off_by_more_than_its_type_explains(name: str) -> None:
    computed = 0
    for shape in islice(draw_shapes(), 0, None, STRIDE):
        backend = backend_for(name, shape)
        if backend is not None:
            computed += 1
            error = relative_error(backend, shape)
            assert error <= LIMITS[shape.sizes["dtype"]], f"{error:.1e} at {shape}"
    assert computed == NUM_SHAPES // STRIDE if name != "numba" else computed >= NUM_SHAPES // STRIDE // 2


def main() -> None:
    print(f"{'backend':8} {'type':>9} {'shapes':>7} {'largest':>9} {'median':>9}")  # noqa: T201
    for name in BACKENDS:
        errors: dict[torch.dtype, list[float]] = {dtype: [] for dtype in LIMITS}
        for shape in draw_shapes():
            backend = backend_for(name, shape)
            if backend is not None:
                errors[shape.sizes["dtype"]].append(relative_error(backend, shape))
        for dtype, values in errors.items():
            values.sort()
            word = str(dtype).removeprefix("torch.")
            print(  # noqa: T201
                f"{name:8} {word:>9} {len(values):>7} {values[-1]:>9.1e} {values[len(values) // 2]:>9.1e}"
            )


if __name__ == "__main__":
    main()
