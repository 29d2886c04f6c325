"""lltm_ext::resize_units: copies of tensors with more or fewer hidden units."""

import pytest
import torch

LAST, FIRST = 1, 2  # dimensions that count units, in groups
resize_units = torch.ops.lltm_ext.resize_units
# Shapes for three units, and where those are.
SHAPES = {(4, 3): LAST, (12,): LAST, (2, 4, 3): LAST, (12, 5): FIRST, (12, 3): FIRST | LAST, (0, 3): LAST}


def padded(x, units_in, units, to):
    """The same by torch."""
    for bit, dim in ((LAST, -1), (FIRST, 0)):
        if not units_in & bit:
            continue
        groups = x.movedim(dim, -1).unflatten(-1, (-1 if x.numel() else 1, units))
        x = torch.nn.functional.pad(groups, (0, to - units)).flatten(-2).movedim(-1, dim)
    return x


def tensors_of(dtype, device):
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=dtype, device=device) for shape in SHAPES]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_added_units_are_zeros_and_removing_them_restores_the_tensors(dtype, device):
    tensors, units_in = tensors_of(dtype, device), list(SHAPES.values())
    wide = resize_units(tensors, units_in, 3, 8)
    for x, y, where in zip(tensors, wide, units_in, strict=True):
        assert torch.equal(y, padded(x, where, 3, 8))
    for x, y in zip(tensors, resize_units(wide, units_in, 8, 3), strict=True):
        assert torch.equal(x, y)


def test_many_tensors_in_any_layout_are_resized(device):
    """More than one launch takes, transposed in memory, of two dtypes."""
    tensors = [torch.randn(3, 5, device=device).t() for _ in range(9)]
    tensors += [torch.randn(5, 3, dtype=torch.float16, device=device) for _ in range(9)]
    for x, y in zip(tensors, resize_units(tensors, [LAST] * 18, 3, 8), strict=True):
        assert torch.equal(y, padded(x, LAST, 3, 8))


def test_gradients_and_second_derivatives(device):
    tensors = [x.requires_grad_() for x in tensors_of(torch.float64, device) if x.numel()]
    units_in = [where for shape, where in SHAPES.items() if 0 not in shape]

    def wide(*tensors):
        return tuple(resize_units(list(tensors), units_in, 3, 8))

    assert torch.autograd.gradcheck(wide, tensors)
    assert torch.autograd.gradgradcheck(wide, tensors)


def test_a_copy_needs_a_gradient_if_its_tensor_does(device):
    x, y = (torch.randn(2, 3, device=device, requires_grad=needs) for needs in (True, False))
    assert [z.requires_grad for z in resize_units([x, y], [LAST, LAST], 3, 8)] == [True, False]


def test_torch_accepts_the_op(device):
    tensors = [x.requires_grad_() for x in tensors_of(torch.float32, device)]
    torch.library.opcheck(resize_units.default, (tensors, list(SHAPES.values()), 3, 8))


def test_errors_name_the_argument():
    with pytest.raises(ValueError, match=r"^resize_units: expected units_in to have 1 numbers"):
        resize_units([torch.ones(3)], [], 3, 8)
    with pytest.raises(
        ValueError,
        match=r"^resize_units: expected from_units and to_units to be positive and below 2.31, got 3 and 0",
    ):
        resize_units([torch.ones(3)], [LAST], 3, 0)
    with pytest.raises(
        ValueError,
        match=r"^resize_units: expected tensors with units in the last dimension to have one, got shape \[\]",
    ):
        resize_units([torch.ones(())], [LAST], 3, 8)


@pytest.mark.parametrize(
    "shape,units_in,message",
    [
        ((3,), 4, r"units_in to be sums of 1 \(the last dimension\) and 2 \(the first\), got 4"),
        ((12,), FIRST, r"tensors with units in the first dimension to be matrices, got shape \[12\]"),
        (
            (2, 3, 3),
            FIRST,
            r"tensors with units in the first dimension to be matrices, got shape \[2, 3, 3\]",
        ),
        ((2, 4), LAST, r"dimensions with units to be multiples of from_units = 3, got shape \[2, 4\]"),
        ((4, 3), FIRST, r"dimensions with units to be multiples of from_units = 3, got shape \[4, 3\]"),
    ],
    ids=str,
)
def test_a_tensor_that_does_not_have_the_units_is_refused(shape, units_in, message, device):
    with pytest.raises(ValueError, match=rf"^resize_units: expected {message}"):
        resize_units([torch.ones(shape, device=device)], [units_in], 3, 8)
