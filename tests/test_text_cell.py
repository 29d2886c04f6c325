"""Own cells given as C++ text, without a GPU: their structs by a C++ compiler, and what is refused."""

import pickle
import re
from pathlib import Path

import pytest
import torch
from cell_examples import CELLS, TEXTS, call_of
from op_suite import DOUBLE, Make, assert_all_near
from test_derive import library_of, run_in_library
from torch._subclasses.fake_tensor import FakeTensorMode

import lltm_ext

UGRNN = {
    "name": "ugrnn",
    "gates": 2,
    "forward": "T g = sigmoid(x[0]), z = tanh(x[1]); new_h = g * h + (1 - g) * z;",
    "saved": ("g", "z", "h"),
    "backward": """
        grad_x[0] = grad_new_h * (h - z) * g * (1 - g);
        grad_x[1] = grad_new_h * (1 - g) * (1 - z * z);
        grad_h = grad_new_h * g;
    """,
}
ugrnn = lltm_ext.recurrence(**UGRNN)
forward_only = lltm_ext.recurrence(name="forward_only", gates=1, forward="new_h = x[0];")
# Names of ours, in the user's texts.
crowded = lltm_ext.recurrence(
    name="crowded",
    gates=1,
    states=("states", "Cell"),
    parameters=("saved", "exp"),
    inputs=("grads", "steps"),
    forward="""
        T in = x[0] + exp, A = grads;
        new_h = in + A * saved, new_states = states + steps, new_Cell = Cell;
    """,
    backward="""
        T in = grad_new_h; /* h */
        grad_x[0] += in;
        grad_exp = in, grad_saved = in * grads, grad_states = grad_new_states, grad_Cell = grad_new_Cell;
    """,
)
STRUCTS = {f"text_{name}": cell for name, cell in TEXTS.items()}
STRUCTS |= {f"function_{name}": CELLS[name] for name in TEXTS} | {"text_crowded": crowded}


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    sources = {name: cell.source for name, cell in STRUCTS.items()}
    return library_of(sources, tmp_path_factory.mktemp("texts"))


def run(compiled, name, cell, rows, kind="double"):
    """The new h and states, and all gradients, in columns."""
    results = cell.gates * (1 + cell.separate) + 2 + 2 * len(cell.states) + len(cell.parameters)
    assert rows.shape[1] == results + len(cell.inputs)
    return run_in_library(compiled, f"{name}_{kind}", rows, results)


@pytest.mark.parametrize("kind", ["double", "float"])
@pytest.mark.parametrize("name", TEXTS)
def test_a_text_computes_what_a_function_does(compiled, name, kind):
    cell = TEXTS[name]
    width = cell.gates * (1 + cell.separate) + 2 + 2 * len(cell.states)
    rows = torch.randn(200, width + len(cell.parameters) + len(cell.inputs), dtype=DOUBLE)
    found, expected = (run(compiled, f"{how}_{name}", cell, rows, kind) for how in ("text", "function"))
    assert_all_near(found, expected, 1e-12 if kind == "double" else 1e-5)


def test_names_in_a_text_do_not_collide_with_ours(compiled):
    rows = torch.randn(50, 11, dtype=DOUBLE)
    x, _, states, cell, saved, exp, grads, steps, grad_h, grad_states, grad_cell = rows.unbind(1)
    expected = [x + exp + grads * saved, states + steps, cell]
    expected += [grad_h, torch.zeros(50), grad_states, grad_cell, grad_h * grads, grad_h]
    assert_all_near(run(compiled, "text_crowded", crowded, rows), expected, 1e-12)


def test_only_a_text_that_names_h_reads_h():
    assert "kReadsH = true" in ugrnn.source
    assert "kReadsH = false" in crowded.source  # where only a comment names it


def test_a_text_cell_says_what_it_is():
    assert repr(TEXTS["gru"]) == (
        "<lltm_ext.recurrence gru in C++, 3 gates, separate products, states: none, parameters: b_hn, "
        "inputs: none, saved for backward: reset, update, product, n, h>"
    )
    assert repr(forward_only).endswith("inputs: none, without backward>")
    assert (ugrnn.__name__, ugrnn.__module__, ugrnn.function) == ("ugrnn", __name__, None)
    assert UGRNN["forward"] in ugrnn.source
    assert UGRNN["backward"] in ugrnn.source


def test_pickle_finds_a_text_cell_by_its_name():
    assert pickle.loads(pickle.dumps(ugrnn)) is ugrnn


def test_a_layer_has_the_parameters_of_a_text_cell():
    layer = lltm_ext.Recurrent(TEXTS["peephole_lstm"], 3, 5)
    shapes = {name: list(x.shape) for name, x in layer.named_parameters()}
    assert shapes == {
        "weight_ih_l0": [20, 3],
        "weight_hh_l0": [20, 5],
        "bias_l0": [20],
        "w_ci_l0": [5],
        "w_cf_l0": [5],
        "w_co_l0": [5],
    }


PAGE = Path(__file__).parent.parent / "docs/own_cell.md"


@pytest.mark.skipif(not PAGE.is_file(), reason="of a checkout")
def test_the_text_of_the_page_is_that_of_a_cell():
    (text,) = re.findall(r"^ugrnn = lltm_ext\.recurrence\(.*?^\)", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    names = {"lltm_ext": lltm_ext}
    exec(compile(text, PAGE, "exec"), names)
    assert names["ugrnn"].source.split() == ugrnn.source.split()


# ---- what is refused


LONG = "new_h = x[0];" + " " * 65536
TEXT, TAKEN = "to be C++ text, got", "which is taken"
REFUSALS = [
    ({"name": None}, ValueError, "recurrence", "name to be an identifier, got ''"),
    ({"name": "my cell"}, ValueError, "recurrence", "name to be an identifier, got 'my cell'"),
    ({"forward": None}, TypeError, "recurrence", "forward with name, backward and saved, but it"),
    ({"forward": len}, TypeError, "ugrnn", f"forward {TEXT} <built-in"),
    ({"backward": 0}, TypeError, "ugrnn", f"backward {TEXT} 0"),
    ({"backward": "a\x1fb"}, ValueError, "ugrnn", "backward to be C++, got a text with the control"),
    ({"forward": LONG}, ValueError, "ugrnn", "forward of at most 65536 characters, got 65549"),
    ({"gates": 0}, ValueError, "ugrnn", "gates to be a positive int, got 0"),
    ({"forward": "T g, z;"}, ValueError, "ugrnn", "forward to assign new_h, which it does not name"),
    ({"states": ("c",)}, ValueError, "ugrnn", "forward to assign new_c, which"),
    ({"saved": ("g", "z", "h", "q")}, ValueError, "ugrnn", "forward to assign q, which"),
    ({"saved": ("g", "g")}, ValueError, "ugrnn", f"saved without the name 'g', {TAKEN}"),
    ({"saved": ("x",)}, ValueError, "ugrnn", f"saved without the name 'x', {TAKEN}"),
    ({"saved": "g"}, TypeError, "ugrnn", "saved to be a sequence of names, got 'g'"),
    ({"saved": ("x[0]",)}, ValueError, "ugrnn", "the names of saved to be identifiers, got 'x"),
    ({"backward": None}, ValueError, "ugrnn", "saved to be empty without a backward, got"),
    ({"backward": "grad_h = 0;"}, ValueError, "ugrnn", "backward to assign grad_x, which"),
    ({"backward": "grad_x[0] = 0; // grad_h"}, ValueError, "ugrnn", "backward to assign grad_h"),
    ({"separate": True}, ValueError, "ugrnn", "backward to assign grad_r, which it does not name"),
    ({"parameters": ("w",)}, ValueError, "ugrnn", "backward to assign grad_w, which"),
    ({"parameters": ("x",)}, ValueError, "ugrnn", f"parameters without the name 'x', {TAKEN}"),
    ({"inputs": ("Math",)}, ValueError, "ugrnn", f"inputs without the name 'Math', {TAKEN}"),
    ({"parameters": ("T",)}, ValueError, "ugrnn", f"parameters without the name 'T', {TAKEN}"),
    ({"inputs": ("new_h",)}, ValueError, "ugrnn", f"inputs without the name 'new_h', {TAKEN}"),
    ({"inputs": ("grad_x",)}, ValueError, "ugrnn", f"inputs without the name 'grad_x', {TAKEN}"),
    ({"parameters": ("g",)}, ValueError, "ugrnn", f"saved without the name 'g', {TAKEN}"),
]


@pytest.mark.parametrize("options, exception, name, message", REFUSALS)
def test_declarations_that_do_not_fit_are_refused(options, exception, name, message):
    with pytest.raises(exception, match="^" + re.escape(f"{name}: expected {message}")):
        lltm_ext.recurrence(**{**UGRNN, **options})


def test_a_text_cell_refuses_the_cpu():
    call = call_of(TEXTS["peephole_lstm"], Make(DOUBLE))
    message = (
        r"^peephole_lstm: expected input on a CUDA device, got cpu \(a cell given as text runs on CUDA only"
    )
    for function in (TEXTS["peephole_lstm"], TEXTS["peephole_lstm"].algorithm):
        with pytest.raises(RuntimeError, match=message):
            call.run(function)
    with pytest.raises(RuntimeError, match=r"^ugrnn: expected input on a CUDA device, got cpu"):
        lltm_ext.Recurrent(ugrnn, 3, 4)(torch.randn(5, 2, 3))
    with pytest.raises(RuntimeError, match=r"^ugrnn: expected input on a CUDA device, got cpu"):
        ugrnn.gradcheck(device="cpu")


def test_a_cell_without_backward_has_none_to_check():
    with pytest.raises(RuntimeError, match=r"^forward_only: has no backward to check"):
        forward_only.gradcheck()


def test_a_text_cell_has_no_steps_in_torchs_ops():
    """From which second derivatives would come."""
    with pytest.raises(RuntimeError, match=r"^ugrnn: its gradient cannot be differentiated again"):
        ugrnn.step([torch.zeros(1)] * 2, (), torch.zeros(1), (), (), ())


def test_a_cell_without_backward_refuses_gradients():
    """With tensors that need no GPU, because they have no data."""
    with FakeTensorMode():
        given = [torch.empty(*shape, device="cuda") for shape in ((3, 2, 4), (2, 5), (5, 4), (5, 5))]
        given[2].requires_grad_()
        message = (
            "forward_only: a gradient with respect to weight_ih is required, but the cell has no backward "
            "(give backward= of lltm_ext.recurrence, or call it under torch.no_grad())"
        )
        with pytest.raises(RuntimeError, match="^" + re.escape(message)):
            forward_only(*given)
        with torch.no_grad():
            output, h_n = forward_only(*given)
        assert (output.shape, h_n.shape) == ((3, 2, 5), (2, 5))
