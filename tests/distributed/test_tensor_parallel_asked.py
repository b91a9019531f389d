"""What code around layers that `parallelize_module` has sliced sees of them: their class, their sizes, hooks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.nn.modules.module import register_module_forward_hook

import psg_fx
from psg_fx.errors import NotYetSupported
from support.by_loop import ByLoop
from support.processes import Processes
from support.sliced import DOWN, UP, far, perceptron, transformed

pytestmark = pytest.mark.xdist_group("processes")
QUANTITIES = [psg_fx.ClippedSum(max_norm=0.3), psg_fx.MeanGrad()]


class Asking(nn.Module):
    """Scales what its layers give by their sizes, and by what they are."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.up.weight, self.down.weight
        h = self.up(x) * weights[0].shape[0] ** -0.5 / weights[1].size(1) * weights[1].size()[1]
        for layer in (self.up, self.down):
            if type(layer) is nn.Linear and isinstance(layer, nn.Linear):
                h = h / (1 + 1 / len(layer.weight))
        return self.down(h.tanh()).mean(1) * weights[1].numel() / torch.numel(weights[0]) * weights[0].nelement()


def check_asking(rank: int, world: int) -> list[type]:
    """Beside one process, and the classes as a step leaves them."""
    _, loss_fn, inputs, targets = perceptron()
    whole = Asking().double()
    model = parallelize_module(copy.deepcopy(whole), init_device_mesh("cpu", (world,)), UP | DOWN)
    out = transformed(model, loss_fn, QUANTITIES)(inputs, targets)
    expected = ByLoop(whole, loss_fn, QUANTITIES)(inputs, targets)
    torch.testing.assert_close(out.norms, expected.norms, rtol=1e-10, atol=1e-12)
    for name, value in expected.clipped_sum.items():
        assert far(out.clipped_sum[name], value) < 1e-10, name
    torch.testing.assert_close(model(inputs), whole(inputs), rtol=1e-12, atol=1e-12)
    assert not any("forward" in vars(layer) for layer in model.children())
    return [type(layer) for layer in model.children()]


def test_sizes_and_classes_are_those_of_whole_layers(processes: Processes) -> None:
    assert processes.run(check_asking, 2) == [[nn.Linear, nn.Linear]] * 2


def twice(module: nn.Module, args: tuple[Tensor]) -> Tensor:
    return 2 * args[0]


def thrice(module: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
    return 3 * output


def check_hooks(rank: int, world: int) -> list[str]:
    """Hooks outside of torch's, which see what the layer is given and gives; and the words for others."""
    mesh, plan = init_device_mesh("cpu", (world,)), {"up": UP["up"], "down": DOWN["down"]}
    model, loss_fn, inputs, targets = perceptron()
    whole = copy.deepcopy(model.double())
    for layer in (model.up, model.down, whole.up, whole.down):
        layer.register_forward_pre_hook(twice)
    parallelize_module(model, mesh, plan)
    for layer in (model.up, model.down, whole.up, whole.down):
        layer.register_forward_hook(thrice)
    step = transformed(model, loss_fn, QUANTITIES)
    out, expected = step(inputs, targets), ByLoop(whole, loss_fn, QUANTITIES)(inputs, targets)
    torch.testing.assert_close(out.norms, expected.norms, rtol=1e-10, atol=1e-12)
    for name, value in expected.clipped_sum.items():
        assert far(out.clipped_sum[name], value) < 1e-10, name
    everywhere = register_module_forward_hook(lambda module, args, output: None)
    with pytest.raises(NotYetSupported, match="forward hooks are on all modules there are"):
        step(inputs, targets)
    everywhere.remove()
    assert torch.equal(step(inputs, targets).norms, out.norms)
    model.down.register_forward_pre_hook(twice)
    return [refusal(step, inputs, targets), refusal(*hooked_before(mesh, plan))]


def check_a_forward_put_on_later(rank: int, world: int) -> str:
    """Refused, and still there after the refusal; without it the step is what it was."""
    model, loss_fn, inputs, targets = perceptron()
    parallelize_module(model.double(), init_device_mesh("cpu", (world,)), {"up": UP["up"], "down": DOWN["down"]})
    step = transformed(model, loss_fn, QUANTITIES)
    before = step(inputs, targets)
    doubled = model.down.forward = lambda x: 2 * nn.functional.linear(x, model.down.weight)
    text = refusal(step, inputs, targets)
    assert vars(model.down)["forward"] is doubled
    del model.down.forward
    assert torch.equal(step(inputs, targets).norms, before.norms)
    return text


def hooked_before(mesh: Any, plan: dict[str, ParallelStyle]) -> Any:
    """A step, with its inputs, of a model whose layer has a hook that torch's comes after."""
    model, loss_fn, inputs, targets = perceptron()
    model.double().down.register_forward_hook(thrice)
    return transformed(parallelize_module(model, mesh, plan), loss_fn, QUANTITIES), inputs, targets


def refusal(step: Any, *given: Tensor) -> str:
    with pytest.raises(NotYetSupported) as error:
        step(*given)
    return str(error.value)


def test_hooks_see_what_they_see_without_slices_or_are_refused(processes: Processes) -> None:
    found = processes.run(check_hooks, 2)[0]
    for text in found:
        assert text.splitlines()[0] == "a hook is between down and what torch's tensor parallelism does around it"
        assert "register pre-hooks before parallelize_module, and hooks after it" in text


def test_a_forward_that_was_put_on_a_layer_after_transform_is_refused(processes: Processes) -> None:
    for text in processes.run(check_a_forward_put_on_later, 2):
        assert text.splitlines()[0] == "down is a Linear, with another forward, in RowwiseParallel"
