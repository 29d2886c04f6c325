"""Ops made at run time: the tutorial's relu, and a softsign with a parameter and a gradient.

    python examples/runtime_relu.py

Runs on the GPU if there is one, else on the CPU with the functions given as ``cpu=``.
"""

import time

import torch

import lltm_ext

relu = lltm_ext.elementwise(
    "T relu(T x)",
    forward="return x <= 0 ? T(0) : x;",  # NaN propagates, as in torch
    backward={"x": "return output <= 0 ? T(0) : grad;"},
    cpu=torch.relu,
)

softsign = lltm_ext.elementwise(
    "T softsign(T x, T a)",
    forward="return x / (a + fabs(x));",
    backward={"x": "T d = a + fabs(x); return grad * a / (d * d);"},
    scalars={"a": 1.0},
    cpu=lambda x, a: x / (a + x.abs()),
)


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(1000, 1000, device=device, requires_grad=True)

    start = time.perf_counter()
    y = relu(x)
    print(f"{relu} on {device}: first call {1e3 * (time.perf_counter() - start):.0f} ms")
    y.sum().backward()
    print("equal to torch.relu:", torch.equal(y, torch.relu(x)))
    print("gradient is where x is positive:", torch.equal(x.grad, (x > 0).float()))

    exact = x.detach() / (2 + x.detach().abs())
    print(f"{softsign}: largest error {(softsign(x, a=2) - exact).abs().max():.1e}")
    print("gradient agrees with finite differences:", softsign.gradcheck(a=2.0))

    compiled = torch.compile(lambda x: 2 * softsign(relu(x)), fullgraph=True)
    print("torch.compile agrees:", torch.allclose(compiled(x), 2 * softsign(relu(x))))


if __name__ == "__main__":
    main()
