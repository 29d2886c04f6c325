"""Recurrent cells, some whose output is a state or several, without a product or given as text, and random
arguments."""

import functools

import torch
from op_suite import DOUBLE, Call, Make
from sequence_suite import assert_values_and_gradients

import lltm_ext
from lltm_ext import cells
from lltm_ext._arguments import SequenceCall
from lltm_ext._loop import run_loop
from lltm_ext._program import diagonal_blocks
from lltm_ext.recurrence import run


@lltm_ext.recurrence(
    gates=3, separate=True, states=("y",), parameters=("b_hn",), inputs=("mask",), output="y"
)
def gru_with_recurrent_dropout(x, r, s, p, u):
    """The product sees the masked output."""
    reset, update = torch.sigmoid(x[0] + r[0]), torch.sigmoid(x[1] + r[1])
    candidate = torch.tanh(x[2] + reset * (r[2] + p.b_hn))
    y = (1 - update) * candidate + update * s.y
    return u.mask * y, (y,)


@lltm_ext.recurrence(gates=4, states=("c", "y"), inputs=("mask",), output="y")
def smoothed_lstm(x, h, s, u):
    """The product sees what it saw before where the mask is 0."""
    i, f, g, o = x
    c = torch.sigmoid(f) * s.c + torch.sigmoid(i) * torch.tanh(g)
    y = 0.25 * s.y + torch.sigmoid(o) * torch.tanh(c)
    return u.mask * y + (1 - u.mask) * h, (c, y)


@lltm_ext.recurrence(
    gates=2, separate=True, states=("c", "n"), parameters={"a": None, "b": 0.5}, inputs=("gap", "mask")
)
def everything(u, p, s, r, x, h):
    """Every value, in an order of its own."""
    gate = torch.sigmoid(x[0] + p.a * r[0] - u.gap)
    n = torch.sigmoid(p[1] * s[0]) + 0.5 * s.n
    c = gate * s.c + (1 - gate) * torch.tanh(x[1] + r[1] * p.b + h)
    return u.mask * h + (1 - u.mask) * torch.tanh(c) / (1 + n * n), (c, n)


@lltm_ext.recurrence(gates=4, states=("c",), output=("c", "h"))
def lstm_of_both_states(x, s):
    i, f, g, o = x
    c = torch.sigmoid(f + 1) * s.c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), (c,)


WITH_OUTPUT = {
    cell.__name__: cell for cell in (gru_with_recurrent_dropout, smoothed_lstm, lstm_of_both_states)
}


@lltm_ext.recurrence(gates=3, separate=True, weights=("weight_hn",))
def gru_with_reset_first(x, r, h, w, units):
    """The GRU of Cho et al., 2014, whose candidate has a product with what the reset gate leaves of h."""
    reset, update = torch.sigmoid(x[0] + r[0]), torch.sigmoid(x[1] + r[1])
    candidate = torch.tanh(x[2] + units.linear(reset * h, w.weight_hn))
    return (1 - update) * candidate + update * h


@lltm_ext.recurrence(
    gates=2,
    states=("c",),
    parameters=("b",),
    inputs=("gap",),
    weights={"square": (1, 1), "tall": (2, 1), "broad": (1, 2)},
)
def mogrified(x, h, s, p, u, w, units):
    """Products one after the other and side by side, of one weight twice, of a value without gradients."""
    a = torch.sigmoid(x[0]) * h
    b = 2 * torch.sigmoid(units.linear(a, w.square)) * x[1]
    a = 2 * torch.sigmoid(units.linear(b, w.square)) * a
    d, e = units.linear(a + u.gap, w.tall)
    n = units.linear((d, e * h), w.broad)
    c = torch.sigmoid(n) * s.c + p.b * torch.tanh(d)
    return torch.tanh(c + n + units.linear(torch.tanh(u.gap + p.b), w.square)), (c,)


@lltm_ext.recurrence(gates=3, separate=True, states=("m",), parameters={"scale": [1.0, 0.5]}, inputs=("gap",))
def many_levels(x, r, h, s, p, u, units):
    """Norms of norms, sums up to a unit, and choices, by a state and an input of the step among others."""
    a, b = units.layer_norm((x[0] + r[0], x[1] + r[1] * u.gap), p.scale)
    share = units.softmax(a + s.m)
    m = 0.5 * s.m + units.rms_norm(b + h) * torch.sigmoid(units.sum(u.gap) / 10)
    m = torch.where((m > 0) & (b > units.mean(b)), m, torch.where(a > 1, 0.5 * a, 0.1 * m))
    return torch.tanh(m * share + units.cumsum(share) + x[2] + r[2] / (1 + units.max(abs(b)))), (m,)


@lltm_ext.recurrence(gates=2, weights={"square": (2, 2)}, parameters=("b",))
def with_shared_gradients(x, h, p, w, units):
    """Both values' products have the same gradients, so that kernels of whole steps compute them together."""
    a, b = torch.sigmoid(x[0]) * h, torch.tanh(x[1] + p.b) + 0.1 * h
    d, e = units.linear((a, b), w.square)
    return 0.5 * h + 0.5 * torch.tanh(d) * torch.sigmoid(e)


WITH_WEIGHTS = {cell.__name__: cell for cell in (gru_with_reset_first, mogrified, with_shared_gradients)}


@lltm_ext.recurrence(
    gates=3, states=("m",), parameters=("scale",), weights={"block": (1, 1), "out": (3, 1)}, inputs=("gap",)
)
def norms_between_products(x, h, s, p, u, w, units):
    """A norm of a product, a product of the norm, and a sum over the units in each stage."""
    a = units.rms_norm(units.linear(h * torch.sigmoid(x[0]), w.block), p.scale)
    r, n, z = units.layer_norm(units.linear(torch.tanh(a) + 0.1 * units.mean(s.m), w.out))
    update = torch.sigmoid(z + x[2] - u.gap)
    new_h = update * torch.tanh(torch.sigmoid(r) * n + x[1]) + (1 - update) * h
    return new_h, (units.softmax(new_h + s.m),)


@lltm_ext.recurrence(gates=2, states=("fast", "slow"), parameters=("rate",), inputs=("gap",), recurrent=False)
def without_product(x, h, s, p, u):
    fast = torch.sigmoid(p.rate) * s.fast + x[0]
    slow = s.slow * torch.exp(-u.gap * u.gap) + 0.1 * fast
    return torch.tanh(fast + x[1] * slow) + 0.5 * h, (fast, slow)


@lltm_ext.recurrence(gates=3, states=("c",), recurrent=False)
def qrnn(x, s):
    forget = torch.sigmoid(x[1])
    c = forget * s.c + (1 - forget) * torch.tanh(x[0])
    return torch.sigmoid(x[2]) * c, (c,)


@lltm_ext.recurrence(gates=1, states=("y",), inputs=("mask",), output="y", recurrent=False)
def masked_unit(x, h, s, u):
    y = torch.tanh(x[0] - 0.9 * h) + 0.1 * s.y
    return u.mask * y, (y,)


@lltm_ext.recurrence(gates=1, states=("a", "v"), inputs=("mask",), output=("v", "h", "a"), recurrent=False)
def adaptive_unit(x, h, s, u):
    """All of its values are outputs, in an order of their own."""
    v = 0.9 * s.v * (1 - h) + x[0] - 0.5 * u.mask * s.a
    return torch.sigmoid(v), (0.8 * s.a + 0.2 * h, v)


@lltm_ext.recurrence(
    gates=0, states=("mean",), parameters=("rate",), inputs=("value", "keep"), recurrent=False, output="mean"
)
def without_gates(h, s, p, u):
    """Reads no input with weights."""
    past = torch.tanh(h)
    mean = s.mean + torch.sigmoid(p.rate) * (u.value + 0.2 * past - s.mean)
    return u.keep * past + mean, (mean,)


@lltm_ext.recurrence(gates=1, states=("im",), parameters=("angle",), recurrent=False, output=("im", "h"))
def resonator(x, h, s, p):
    """Two states that mix, both outputs."""
    real, imaginary = 0.8 * torch.cos(p.angle), 0.8 * torch.sin(p.angle)
    return real * h - imaginary * s.im + x[0], (imaginary * h + real * s.im,)


@lltm_ext.recurrence(gates=2, states=("a", "b", "c"), recurrent=False)
def four_mixing(x, h, s):
    """Four states that mix, by a factor that depends on the input, and lose what they have."""
    keep = 0.35 + 0.04 * torch.sigmoid(x[1])
    total, others = h + s.a, s.b - s.c
    new = keep * (total + s.b + s.c) + x[0], keep * (h - s.a + others), keep * (total - s.b - s.c)
    return new[0], (new[1], new[2] - 0.1 * x[0], keep * (s.a - h + others))


@lltm_ext.recurrence(gates=1, states=("y",), output="y", recurrent=False)
def growing(x, h, s):
    """h is y where both start from zeros, but its coefficients are powers of 4, which soon overflow."""
    return x[0] + 4 * (h - s.y), (1.0 * x[0],)


@lltm_ext.recurrence(gates=4, states=("c",), recurrent=False)
def signs(x, s):
    """The new state is affine in the old one and h is not, though no gradient reads a state."""
    c = 0.5 * s.c + x[0] + x[1] + x[2] + x[3]
    return torch.sign(c), (c,)


@lltm_ext.recurrence(gates=1, separate=True, states=("c",), parameters=("rate",), inputs=("gain",))
def leaky_rnn(x, r, h, s, p, u):
    """Everything that a cell may read, with the weights of one gate."""
    keep = torch.sigmoid(p.rate)
    c = keep * s.c + (1 - keep) * torch.tanh(x[0] + torch.sin(r[0]))
    return u.gain * c + 0.3 * h, (c,)


MIXING = {cell.__name__: cell for cell in (resonator, four_mixing)}
WITHOUT_PRODUCT = {
    cell.__name__: cell for cell in (without_product, qrnn, masked_unit, adaptive_unit, without_gates)
}
CELLS = {name: getattr(cells, name) for name in cells.__all__} | WITH_OUTPUT | WITHOUT_PRODUCT
SURROGATES = ("lif",)  # whose gradient is not the derivative, so that finite differences differ

# The gradient jumps where relu and maximum do, and h where a neuron spikes. Half types round projections and
# h, so their forward can take another branch than one in float64. With these amounts, added to the bias of a
# gate and subtracted in every other unit, all units stay far from there. (test_half_gradients.py has values
# on the jumps.)
SIDES = {"rnn_relu": (8,), "indrnn": (8,), "lif": (4,), "slstm": (6, -6, 0, 0)}


def arguments_of(cell, make, steps, batch, hidden, input_size, bias=True, heads=1):
    """A Call of input, states, weight_ih, weight_hh, bias, values of parameters. `steps`: [T, B], [N]."""
    rows = cell.gates * hidden
    if cell.gates == 0:
        input_size, bias = 0, False
    states = [make(batch, hidden, scale=0.5).abs() + 0.1 for _ in cell.state_names]
    weight_ih = make(rows, input_size, scale=0.5 * input_size**-0.5) if cell.gates > 0 else None
    rows_hh, scale = len(cell.recurrent_gates) * hidden, 0.5 * max(hidden, 1) ** -0.5
    weight_hh = make(rows_hh, hidden // heads, scale=scale) if cell.recurrent else None
    if cell.weights:  # with rows for all gates, then the blocks of its own weights
        weight_hh = between_heads_zero(cell, make(cell.rows_of_products * hidden, hidden, scale=scale))
    biases = make(rows) if bias else None
    if bias and cell.__name__ in SIDES and make.dtype.itemsize == 2:
        sign = torch.tensor([1.0, -1.0]).repeat(hidden)[:hidden]
        biases += torch.outer(torch.tensor(SIDES[cell.__name__]), sign).flatten().to(biases)
        weight_hh = None if weight_hh is None else 0.4 * weight_hh
    parameters = [make(hidden, scale=0.1) for _ in cell.declared.parameters]  # larger peepholes are chaotic
    if cell.__name__ == "lif":  # smaller ones make the gradient of v0 subnormal in float16
        parameters = [p.abs() + 0.3 for p in parameters]
    return Call(make(*steps, input_size), states, weight_ih, weight_hh, biases, parameters)


def between_heads_zero(cell, weight_hh):
    """weight_hh with zeros between the heads of the blocks that are block-diagonal (cell.with_heads)."""
    units, blocks = diagonal_blocks(cell)
    head = torch.arange(weight_hh.shape[1], device=weight_hh.device) // max(units, 1)
    keep = torch.ones_like(weight_hh).view(-1, len(head), len(head))
    for block in blocks:
        keep[cell.gates + block] = (head[:, None] == head).to(keep)
    return (weight_hh.detach() * keep.view_as(weight_hh)).requires_grad_(weight_hh.requires_grad)


def named_parameters(cell, values):
    """The parameters of a call, given their values of a unit."""
    rest = iter(values)
    return {name: torch.cat([next(rest) for _ in range(n)]) for name, n in cell.widths().items()}


def call_of(cell, make, length=5, batch=3, hidden=6, input_size=4, heads=1):
    """A Call of a cell with its arguments, except the inputs of its steps."""
    input, states, *weights, parameters = arguments_of(
        cell, make, (length, batch), batch, hidden, input_size, heads=heads
    ).args
    hx = tuple(states) if cell.states else states[0]
    input = input if cell.gates > 0 else None
    named = named_parameters(cell, parameters)
    if cell.weights:
        weights[1] = weights[1][: len(cell.recurrent_gates) * hidden].clone()
    named |= {
        name: make(n * hidden, k * hidden, scale=0.5 * hidden**-0.5) for name, (n, k) in cell.weights.items()
    }
    return Call(input, hx, *weights, **named)


# Some of these cells, given as text.
TEXTS = {
    "peephole_lstm": lltm_ext.recurrence(
        name="peephole_lstm",
        gates=4,
        states=("c",),
        parameters=("w_ci", "w_cf", "w_co"),
        forward="""
            T i = sigmoid(x[0] + w_ci * c), f = sigmoid(x[1] + w_cf * c), g = tanh(x[2]);
            new_c = f * c + i * g;
            T o = sigmoid(x[3] + w_co * new_c), t = tanh(new_c);
            T keep = 1 - f;  // near 1, f would lose its distance from 1 in a half type
            new_h = o * t;
        """,
        saved=("i", "keep", "g", "o", "t", "c", "new_c"),
        backward="""
            const T f = 1 - keep;
            grad_x[3] = grad_new_h * t * o * (1 - o);
            const T grad = grad_new_c + grad_new_h * o * (1 - t * t) + grad_x[3] * w_co;
            grad_x[0] = grad * g * i * (1 - i);
            grad_x[1] = grad * c * f * keep;
            grad_x[2] = grad * i * (1 - g * g);
            grad_c = grad * f + grad_x[0] * w_ci + grad_x[1] * w_cf;
            grad_w_ci = grad_x[0] * c, grad_w_cf = grad_x[1] * c, grad_w_co = grad_x[3] * new_c;
        """,
    ),
    "gru": lltm_ext.recurrence(
        name="gru",
        gates=3,
        separate=True,
        parameters=("b_hn",),
        forward="""
            T gate[2];
            for (int k = 0; k < 2; ++k) gate[k] = sigmoid(x[k] + r[k]);
            T reset = gate[0], update = gate[1], product = r[2] + b_hn, n = tanh(x[2] + reset * product);
            new_h = (1 - update) * n + update * h;
        """,
        saved=("reset", "update", "product", "n", "h"),
        backward="""
            grad_x[2] = grad_new_h * (1 - update) * (1 - n * n);
            grad_x[1] = grad_new_h * (h - n) * update * (1 - update);
            grad_x[0] = grad_x[2] * product * reset * (1 - reset);
            grad_b_hn = grad_x[2] * reset;
            grad_r[0] = grad_x[0], grad_r[1] = grad_x[1], grad_r[2] = grad_b_hn;
            grad_h = grad_new_h * update;
        """,
    ),
    "cfc": lltm_ext.recurrence(
        name="cfc",
        gates=4,
        inputs=("time",),
        forward="""
            T t = sigmoid(x[2] * time + x[3]), a = tanh(x[0]), b = tanh(x[1]);
            new_h = a + t * (b - a);
        """,
        saved=("t", "a", "b"),
        backward="""
            grad_x[0] = grad_new_h * (1 - t) * (1 - a * a);
            grad_x[1] = grad_new_h * t * (1 - b * b);
            grad_x[3] = grad_new_h * (b - a) * t * (1 - t);
            grad_x[2] = grad_x[3] * time;
        """,
    ),
    "gru_with_recurrent_dropout": lltm_ext.recurrence(
        name="gru_with_recurrent_dropout",
        gates=3,
        separate=True,
        states=("y",),
        parameters=("b_hn",),
        inputs=("mask",),
        output="y",
        forward="""
            T reset = sigmoid(x[0] + r[0]), update = sigmoid(x[1] + r[1]), product = r[2] + b_hn;
            T n = tanh(x[2] + reset * product);
            new_y = (1 - update) * n + update * y;
            new_h = mask * new_y;
        """,
        saved=("reset", "update", "product", "n", "y"),
        backward="""
            const T grad = grad_new_y + mask * grad_new_h;
            grad_x[2] = grad * (1 - update) * (1 - n * n);
            grad_x[1] = grad * (y - n) * update * (1 - update);
            grad_x[0] = grad_x[2] * product * reset * (1 - reset);
            grad_b_hn = grad_x[2] * reset;
            grad_r[0] = grad_x[0], grad_r[1] = grad_x[1], grad_r[2] = grad_b_hn;
            grad_y = grad * update;
        """,
    ),
    "lstm_of_both_states": lltm_ext.recurrence(
        name="lstm_of_both_states",
        gates=4,
        states=("c",),
        output=("c", "h"),
        forward="""
            T i = sigmoid(x[0]), f = sigmoid(x[1] + 1), g = tanh(x[2]), o = sigmoid(x[3]);
            new_c = f * c + i * g;
            T keep = 1 - f, t = tanh(new_c);
            new_h = o * t;
        """,
        saved=("i", "keep", "g", "o", "t", "c"),
        backward="""
            const T f = 1 - keep;
            const T grad = grad_new_c + grad_new_h * o * (1 - t * t);
            grad_x[0] = grad * g * i * (1 - i);
            grad_x[1] = grad * c * f * keep;
            grad_x[2] = grad * i * (1 - g * g);
            grad_x[3] = grad_new_h * t * o * (1 - o);
            grad_c = grad * f;
        """,
    ),
}


class Example:
    """A cell, or the text of one, and random arguments. `reset`: the dtype of its resets; True: bool."""

    def __init__(
        self,
        cell,
        dtype=DOUBLE,
        length=5,
        batch=3,
        hidden=6,
        input_size=4,
        sizes=None,
        bias=True,
        reset=None,
        reset_to="zeros",
        device="cpu",
        heads=1,
    ):
        self.cell, self.dtype, self.sizes, self.reset_to = cell, dtype, sizes, reset_to
        self.of_function = CELLS[cell.__name__] if cell.function is None else cell
        batch, steps = (batch, (length, batch)) if sizes is None else (sizes[0], (sum(sizes),))
        self.call = arguments_of(cell, Make(dtype, device), steps, batch, hidden, input_size, bias, heads)
        shapes = [(*steps, hidden), steps]  # one for each unit, and one for all of them
        self.inputs = [torch.rand(shapes[i % 2], device=device) for i in range(len(cell.inputs))]
        self.reset = None
        if reset:
            at = torch.rand(steps, device=device) < 0.4
            is_bool = reset in (True, torch.bool)
            self.reset = at if is_bool else (at * torch.rand(steps, device=device)).to(reset)

    def ours(self, *tensors, algorithm="auto", reverse=False):
        call = SequenceCall(*tensors, self.inputs, self.reset, self.sizes, reverse)
        output, final = run(self.cell, call, algorithm, self.reset_to)
        return [output, *final]

    def loop(self, *tensors, reverse=False):
        inputs = [u.to(self.dtype) for u in self.inputs]  # as the kernels read them
        call = SequenceCall(*tensors, inputs, self.reset, self.sizes, reverse)
        output, final = run_loop(self.of_function, call, to_initial=self.reset_to == "initial")
        return [output, *final]

    def check(self, call=None, algorithm="auto", reverse=False):
        """Values and gradients against the loop in float64."""
        call = call or self.call
        outputs, gradients = assert_values_and_gradients(
            functools.partial(self.ours, algorithm=algorithm, reverse=reverse),
            functools.partial(self.loop, reverse=reverse),
            call,
            self.dtype,
            zeros_for_unused=self.cell.gates == 0
            or (not self.cell.recurrent and not self.cell.derived.reads_h),
        )
        assert [y.dtype for y in outputs] == [self.dtype, *(x.dtype for x in call.args[1])]
        assert [g.dtype for g in gradients] == [x.dtype for x in call.tensors]
