import torch  # before _C

from . import _C  # noqa: F401  # registers torch.ops.lltm_wheel


@torch.library.register_fake("lltm_wheel::pointwise")
def _(gates, c):
    return torch.empty_like(c), torch.empty_like(c)


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(inputs[0], output[1])


def _backward(ctx, grad_h, grad_c):
    gates, new_c = ctx.saved_tensors
    i, o, z = gates.chunk(3, dim=1)
    i, o, z, tanh_c = i.sigmoid(), o.sigmoid(), torch.nn.functional.elu(z), new_c.tanh()
    grad_c = grad_c + grad_h * o * (1 - tanh_c * tanh_c)
    grad_i, grad_o = grad_c * z * i * (1 - i), grad_h * tanh_c * o * (1 - o)
    return torch.cat([grad_i, grad_o, grad_c * i * (1 + z.clamp(max=0))], dim=1), grad_c


torch.library.register_autograd("lltm_wheel::pointwise", _backward, setup_context=_setup_context)
pointwise = torch.ops.lltm_wheel.pointwise
