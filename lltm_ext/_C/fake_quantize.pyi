from torch import Tensor

def forward(
    input: Tensor, scale: Tensor, zero_point: Tensor, quant_min: int, quant_max: int, axis: int | None = None
) -> tuple[Tensor, Tensor]: ...
def backward(grad_output: Tensor, mask: Tensor) -> Tensor: ...
def backward_learnable(
    grad_output: Tensor,
    input: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    quant_min: int,
    quant_max: int,
    axis: int | None = None,
    grad_factor: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]: ...
