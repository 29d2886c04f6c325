from torch import Tensor

def forward(
    a: Tensor, b: Tensor, initial: Tensor | None = None, reset: Tensor | None = None, reverse: bool = False
) -> Tensor: ...
def backward(
    grad: Tensor,
    a: Tensor,
    h: Tensor,
    initial: Tensor | None = None,
    reset: Tensor | None = None,
    reverse: bool = False,
) -> tuple[Tensor, Tensor, Tensor]: ...
