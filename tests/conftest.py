"""What holds for every test."""

import gc
import importlib
import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that tests start: they are several at once
os.environ.setdefault("CI", "1")  # where torch only warns of operators whose results share memory, it raises then


_WHOLE = ("test_zoo.py", "test_families.py", "test_model_types.py")
"""Files of which the quick run takes every case. Of any other test it takes the first."""

_LONG = tuple(
    f"tests/{place}"
    for place in """
    api/test_api.py::test_dynamo api/test_api.py::test_the_demonstration api/test_fp8_compute.py::test_compiled
    api/test_misuse.py::test_a_warning_of_torch api/test_misuse.py::test_ctrl_c
    api/test_quantize_lists.py::test_a_block_that_shares api/test_quantize_lists.py::test_a_compiler api/test_scale.py benchmarks/
    codegen/test_decode.py codegen/test_fp8_rows.py::test_rows codegen/test_fragments_sm80.py codegen/test_packed.py::test_e4m3
    codegen/test_packed.py::test_products codegen/test_spec.py::test_the_programs_command_line_stays_its_own
    cuda/test_not_waiting.py::test_a_compiler_that_takes_its_time cuda/test_ops.py::test_importing_the_operators
    detect/test_changing_numbers.py::test_a_branch_on_one detect/test_collected.py::test_compiled
    detect/test_constants.py::test_plain_numbers_pass_no detect/test_decisions.py::test_as_many_are_gone
    distributed/test_batch_dependence.py distributed/test_checkpoint.py distributed/test_compile.py distributed/test_counted.py
    distributed/test_elastic.py distributed/test_fp8.py distributed/test_graphed.py distributed/test_mesh.py::test_a_checkpoint
    distributed/test_other_kinds.py::test_a_step_that distributed/test_transformers.py
    formats/test_formats.py::test_mxfp4_as_trans inspect/test_cli.py::test_a_plan_says inspect/test_page.py::test_blocks_that
    inspect/test_watching.py::test_torch_logs integrations/test_dynamo.py::test_optimized_model_compiles
    integrations/test_linear4bit.py::test_a_compiler integrations/test_linear_lora.py::test_a_compiler
    integrations/test_linear_lora.py::test_a_forward_that_others
    integrations/test_linear_lora.py::test_a_token_has_the_same_bits_in_any_compiled
    integrations/test_linear_lora.py::test_hooks_and_forwards integrations/test_linear_lora.py::test_scales_that
    integrations/test_linear_lora.py::test_what_a_compiler integrations/test_peft_experts.py::test_a_compiler
    integrations/test_peft_experts.py::test_a_stack_of integrations/test_peft_experts.py::test_adapters_of_other
    integrations/test_qlora.py::test_a_batch integrations/test_tiny_models.py::test_every_type
    integrations/test_transformers.py::test_generate_and_compile isolation/test_held_objects.py::test_classes_are_left
    jit/test_background.py jit/test_packs.py ops/test_adding.py::test_a_functional_compiler
    ops/test_direct.py::test_second_derivatives ops/test_experts.py::test_compiles ops/test_fixed_order.py::test_200_random
    ops/test_moe_ffn_sources.py::test_opcheck passes/test_kept_routers.py::test_schedules_under
    passes/test_memory.py::test_the_analysis_holds passes/test_own_code.py::test_weights_that
    passes/test_partly_kept.py::test_what_gets passes/test_sizes.py::test_more_tokens
    runtime/test_attribute_guards.py::test_a_compiler runtime/test_checkpoints.py::test_a_second_run
    runtime/test_install.py::test_fullgraph runtime/test_install.py::test_the_compiler_sees_no test_architecture.py::test_a_plan
    test_docs.py test_families.py::test_the_command test_first_call.py::test_a_model_that_is_compiled
    test_first_call.py::test_a_step_with_its test_mutations.py test_packaging.py test_poor_examples.py test_whole_models.py
    """.split()
)
"""Tests that take seconds, several processes or a compiler. They are in README's second command."""


def pytest_configure(config: pytest.Config) -> None:
    """A snapshot of a test that the other command runs is no error: a run in which all tests passed ended with 1."""
    config.option.warn_unused_snapshots = True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what README's first command leaves to its second."""
    taken = set[str]()
    for item in items:
        test = item.nodeid.partition("[")[0]
        if test.startswith(_LONG) or (test in taken and item.path.name not in _WHOLE):
            item.add_marker("more")
        elif not {"slow", "gpu", "multigpu"} & {mark.name for mark in item.iter_markers()}:
            taken.add(test)


_MANY = 100
_imported = 0


def pytest_collection_finish() -> None:
    """What was imported so far stays, so the garbage collector need not look at it in every test."""
    _freeze()


def pytest_runtest_logfinish() -> None:
    """Nor at what a test imported: with a library or two, that was a sixth of the time of the tests after it."""
    if len(sys.modules) >= _imported + _MANY:
        gc.collect()
        _freeze()


def _freeze() -> None:
    global _imported
    _imported = len(sys.modules)
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def seeds_are_not_kept_for_absent_devices() -> Iterator[None]:
    """torch.manual_seed keeps each seed for all kinds of devices, with a text of the stack: a third of the time of a comparison."""
    import torch  # after its environment is set

    with pytest.MonkeyPatch.context() as patch:
        for kind in (torch.cuda, torch.xpu, torch.mtia):
            if not kind.is_available():
                patch.setattr(kind, "manual_seed_all", lambda seed: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def rewritten_code_at_any_size() -> Iterator[None]:
    """Test inputs are small: blocks whose own code is the quicker there would be compared with themselves."""
    from hexa_fx.ir import NEVER_SMALL  # imports torch, after its environment is set

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.import_module("hexa_fx.passes.rewrite"), "own_code_limit", lambda *_: NEVER_SMALL)
        yield


@pytest.fixture(autouse=True)
def the_same_random_numbers() -> None:
    """Every test starts from one state of torch's generator, whatever ran before it."""
    import torch

    torch.manual_seed(0)


@pytest.fixture
def own_code_when_small(rewritten_code_at_any_size: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As users have it, nevertheless: what the first pages run is large enough."""
    from hexa_fx.passes.rewrite.own_code import own_code_limit

    monkeypatch.setattr(importlib.import_module("hexa_fx.passes.rewrite"), "own_code_limit", own_code_limit)


@pytest.fixture
def requested(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The kernels that are requested for an H200. A stand-in: parameters lie on a CPU."""
    import torch

    from hexa_fx import jit
    from hexa_fx import source_kernels as of_sources
    from hexa_fx.cuda import choosing
    from hexa_fx.passes import kernel_requests as of_dense_weights

    found: list[object] = []
    monkeypatch.setattr(jit, "builder", lambda: SimpleNamespace(request=found.extend))
    for requests in (of_dense_weights, of_sources):
        monkeypatch.setattr(requests, "device_of", lambda block: torch.device("cuda", 0))
    monkeypatch.setattr(choosing, "device_card", lambda device: choosing.typical_card(90))
    return found
