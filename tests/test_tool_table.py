"""docs/tools.md: each cell of its table, a module of ours with a tool around torch."""

import contextlib
import copy
import io
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from tooling import ROOT
from torch import nn
from torch.utils._pytree import tree_leaves

import lltm_ext

pytestmark = pytest.mark.filterwarnings("ignore")  # of the tools
PAGE = (ROOT / "docs/tools.md").read_text()
SIZE, H, T, B = 8, 6, 5, 4
ROWS = T * B


class Column(NamedTuple):
    make: tuple[Callable[[], nn.Module], ...]
    products: int = 0  # multiply-adds of a call
    tolerance: float = 1e-5
    steps: bool = True  # whether the input is [T, B, SIZE], else [B, SIZE]


def sequence(gates, make):
    return Column((make,), ROWS * gates * H * (SIZE + H))


COLUMNS = {
    "LSTM": sequence(4, lambda: lltm_ext.LSTM(SIZE, H)),
    "GRU": sequence(3, lambda: lltm_ext.GRU(SIZE, H)),
    "RNN": sequence(1, lambda: lltm_ext.RNN(SIZE, H)),
    "LLTM": sequence(3, lambda: lltm_ext.LLTM(SIZE, H)),
    "Recurrent": sequence(2, lambda: lltm_ext.Recurrent(lltm_ext.cells.ugrnn, SIZE, H)),
    "LLTMCell": Column((lambda: lltm_ext.LLTMCell(SIZE, H),), B * 3 * H * (SIZE + H), steps=False),
    "Linear": Column((lambda: lltm_ext.Linear(SIZE, H),), ROWS * SIZE * H),
    "Linear with activation": Column((lambda: lltm_ext.Linear(SIZE, H, activation="gelu"),), ROWS * SIZE * H),
    "ReLU, Sigmoid": Column((lltm_ext.ReLU, lltm_ext.Sigmoid)),
    "Round, Floor, Ceil, Trunc": Column((lltm_ext.Round, lltm_ext.Floor, lltm_ext.Ceil, lltm_ext.Trunc)),
    "Binarize": Column((lambda: lltm_ext.Binarize(0.1),)),
    "FakeQuantize": Column((lambda: lltm_ext.FakeQuantize(-8, 7, 0.1),)),
    "StochasticRound": Column((lambda: lltm_ext.StochasticRound(torch.bfloat16),), tolerance=2**-6),
}


class Model(nn.Module):
    """A module in a model, behind a layer of torch."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.first = nn.Linear(SIZE, SIZE)
        self.layer = layer

    def forward(self, input):
        return self.layer(self.first(input))


class Case(NamedTuple):
    """A model to try a tool with."""

    column: Column
    model: nn.Module
    folder: Path

    def input(self, steps=T, batch=B):
        return torch.randn(steps, batch, SIZE) if self.column.steps else torch.randn(batch, SIZE)

    def compare(self, function, *inputs, near=None):
        tolerance = near or self.column.tolerance
        for input in inputs or (self.input(),):
            found, expected = (
                [torch.as_tensor(x).float() for x in tree_leaves(f(input))] for f in (function, self.model)
            )
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)

    def compare_training(self, function):
        """Compares results and the gradients of all parameters."""
        self.compare(function)
        input, gradients = self.input(), []
        for model in (function, self.model):
            model.zero_grad()
            tree_leaves(model(input))[0].float().square().sum().backward()
            gradients.append([whole(p.grad) for p in model.parameters() if p.grad is not None])
        assert gradients[0]
        tolerance = 20 * self.column.tolerance
        torch.testing.assert_close(*gradients, rtol=tolerance, atol=tolerance)


def whole(x):
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def perturbed(model):
    other = copy.deepcopy(model)
    with torch.no_grad():
        for x in other.state_dict().values():
            x.add_(1)
    return other


@contextlib.contextmanager
def process_group(case):
    store = torch.distributed.FileStore(str(case.folder / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


# ---- the tools ---------------------------------------------------------------------------------------------


def fx(case):
    traced = torch.fx.symbolic_trace(case.model)
    assert any(node.op == "call_module" and node.target == "layer" for node in traced.graph.nodes)
    case.compare(traced, case.input(3, 2))


def script(case):
    torch.jit.script(copy.deepcopy(case.model)).save(case.folder / "model.pt")
    loaded = torch.jit.load(case.folder / "model.pt")
    case.compare(loaded, case.input(3, 2))
    case.compare_training(loaded)


def trace(case):
    torch.jit.trace(case.model, case.input(), check_trace=False).save(case.folder / "model.pt")
    case.compare(torch.jit.load(case.folder / "model.pt"), case.input(), case.input(3, 2))


def onnx(case, dynamo):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    path, input = str(case.folder / "model.onnx"), case.input()
    torch.onnx.export(case.model, (input,), path, dynamo=dynamo, input_names=["input"], verbose=False)
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    case.compare(lambda x: session.run(None, {"input": x.numpy()}), input)


def export(case, sizes=None, *others):
    input = case.input()
    program = torch.export.export(case.model, (input,), dynamic_shapes=sizes)
    torch.export.save(program, case.folder / "model.pt2")
    case.compare(torch.export.load(case.folder / "model.pt2").module(), input, *others)


def export_dynamic(case):
    names = ("length", "batch") if case.column.steps else ("batch",)
    sizes = {i: torch.export.Dim(name) for i, name in enumerate(names)}
    export(case, {"input": sizes}, case.input(3, 7))


def aot_inductor(case):
    program, path = torch.export.export(case.model, (case.input(),)), str(case.folder / "model.pt2")
    torch._inductor.aoti_compile_and_package(program, package_path=path)
    case.compare(torch._inductor.aoti_load_package(path))


def compiled(case):
    torch._dynamo.reset()
    case.compare_training(torch.compile(copy.deepcopy(case.model), fullgraph=True))


def flop_counter(case):
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        case.model(case.input())
    rows = ROWS if case.column.steps else B
    assert counter.get_total_flops() == 2 * (rows * SIZE * SIZE + case.column.products)


class StaysInFloatingPoint(Exception):
    """The tool left the module as it is, and the result is right."""


def check_quantized(case, quantized):
    case.compare(quantized, near=0.1)
    if not any(type(m).__module__.startswith("torch.ao.nn.quantized") for m in quantized.modules()):
        raise StaysInFloatingPoint


def quantize_dynamic(case):
    check_quantized(case, torch.ao.quantization.quantize_dynamic(copy.deepcopy(case.model), {"layer"}))


def quantize_fx(case):
    from torch.ao.quantization import QConfigMapping, default_dynamic_qconfig, get_default_qconfig
    from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

    is_dynamic = isinstance(case.model.layer, nn.RNNBase)
    config = default_dynamic_qconfig if is_dynamic else get_default_qconfig("x86")
    mapping = QConfigMapping().set_module_name("layer", config)
    prepared = prepare_fx(copy.deepcopy(case.model), mapping, (case.input(),))
    prepared(torch.cat([case.input() for _ in range(20)]))
    check_quantized(case, convert_fx(prepared))


def fsdp(case):
    from torch.distributed.fsdp import fully_shard

    with process_group(case):
        mesh, model = torch.distributed.init_device_mesh("cpu", (1,)), copy.deepcopy(case.model)
        fully_shard(model.layer, mesh=mesh)
        case.compare_training(fully_shard(model, mesh=mesh))


def ddp(case):
    with process_group(case):
        case.compare_training(nn.parallel.DistributedDataParallel(copy.deepcopy(case.model)))


def checkpoint(case):
    import torch.distributed.checkpoint as dcp

    dcp.save({"model": case.model.state_dict()}, checkpoint_id=case.folder)
    other = perturbed(case.model)
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=case.folder)
    other.load_state_dict(state["model"])
    case.compare(other)


def lora(case):
    peft = pytest.importorskip("peft")
    wrapped = peft.get_peft_model(copy.deepcopy(case.model), peft.LoraConfig(target_modules=["layer"]))
    case.compare(wrapped)  # the adapter is zero at first
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    input = case.input()
    expected = wrapped(input)
    assert not torch.equal(expected, case.model(input))
    torch.testing.assert_close(wrapped.merge_and_unload()(input), expected, rtol=1e-4, atol=1e-4)


def safetensors(case):
    torchs = pytest.importorskip("safetensors.torch")
    torchs.save_model(case.model, str(case.folder / "model.safetensors"))
    other = perturbed(case.model)
    torchs.load_model(other, str(case.folder / "model.safetensors"))
    case.compare(other)


def copies(case):
    file = io.BytesIO()
    torch.save(case.model, file)
    file.seek(0)
    case.compare_training(torch.load(file, weights_only=False))
    for other in (copy.copy(case.model), copy.deepcopy(case.model), pickle.loads(pickle.dumps(case.model))):
        case.compare_training(other)


def functions(case):
    """functional_call, grad and vmap of torch.func, for two models at once."""
    models = [case.model, perturbed(case.model)]
    parameters, buffers = torch.func.stack_module_state(models)
    input = case.input()

    def loss(values, others):
        output = torch.func.functional_call(case.model, (values, others), (input,))
        return tree_leaves(output)[0].float().square().sum()

    found = torch.vmap(torch.func.grad(loss), randomness="different")(parameters, buffers)
    for i, model in enumerate(models):
        expected = torch.func.grad(loss)(dict(model.named_parameters()), dict(model.named_buffers()))
        tolerance = 20 * case.column.tolerance
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name][i], gradient, rtol=tolerance, atol=tolerance)
    case.compare(lambda x: torch.func.functional_call(case.model, case.model.state_dict(), (x,)))


TOOLS = {
    "torch.compile": compiled,
    "torch.export": export,
    "torch.export, dynamic": export_dynamic,
    "AOTInductor": aot_inductor,
    "ONNX, dynamo=True": lambda case: onnx(case, True),
    "ONNX, dynamo=False": lambda case: onnx(case, False),
    "torch.jit.script": script,
    "torch.jit.trace": trace,
    "torch.fx": fx,
    "torch.func": functions,
    "copy, pickle": copies,
    "safetensors": safetensors,
    "checkpoint": checkpoint,
    "DDP": ddp,
    "FSDP2": fsdp,
    "FlopCounterMode": flop_counter,
    "peft": lora,
    "quantize_dynamic": quantize_dynamic,
    "FX quantization": quantize_fx,
}
REFUSED = "is not supported|stochastic_round|NoneType"  # in errors; AOTInductor's module returns None
SLOW = ("torch.compile", "AOTInductor")  # of several modules in a column, the first is tried

# ---- the page ----------------------------------------------------------------------------------------------

LINES = [
    [cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line[:1] == "|"
]
HEAD = LINES[0][1:]
TABLE = {tool: row[1:] for row in LINES[2:] if len(row) == len(LINES[0]) for tool in row[0].split("; ")}


def test_the_page_has_all_modules_and_tools():
    assert list(COLUMNS) == HEAD and sorted(TABLE) == sorted(TOOLS)
    modules = {name for name, x in vars(lltm_ext).items() if isinstance(x, type) and issubclass(x, nn.Module)}
    assert modules <= set(re.findall(r"\w+", " ".join(COLUMNS)))


@pytest.mark.compiles
@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("tool", TOOLS)
def test_the_tool_takes_the_module_or_not(tool, column, tmp_path):
    cell, result = TABLE[tool][HEAD.index(column)], contextlib.nullcontext()
    if cell != "yes":
        (reason,) = re.findall(rf"^{cell}\. (.*)", PAGE, re.MULTILINE)
        stays = reason.startswith("The module stays in floating point, with the right results: ")
        result = pytest.raises(StaysInFloatingPoint) if stays else pytest.raises(Exception, match=REFUSED)
    makes = COLUMNS[column].make[: 1 if tool in SLOW else None]
    with result:
        for i, make in enumerate(makes):
            torch.manual_seed(0)
            folder = tmp_path / str(i)
            folder.mkdir()
            TOOLS[tool](Case(COLUMNS[column], Model(make()).eval(), folder))
