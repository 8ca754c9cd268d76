"""Which passes may be captured as CUDA graphs, and what a failed capture leaves behind.

Streams, graphs and torch's functions for a device are simulated; what they do is written down.
"""

import gc
import warnings
import weakref
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from threading import Thread

import pytest
import tiny_models
import torch
from decoding import decode
from static_passes import PlainKernel, PlainLayers, static_target
from tiny_models import generate, make_tiny_model, random_prompt
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ragaccel.decoding import Request
from ragaccel.engine import (
    CaptureError,
    Engine,
    GraphRecorder,
    StaticPass,
    SynchronizationGuard,
    causal_rows,
    watch_synchronization,
)
from ragaccel.engine.capture import _crosses_devices
from ragaccel.models import HuggingFaceModel, expected_passes, static_network
from ragaccel.models.capture_safety import capture_obstacle, use_capturable_experts

ROPE = {"rope_theta": 10_000.0}
DYNAMIC = {"rope_type": "dynamic", **ROPE, "factor": 2.0}
LONG = {
    "rope_type": "longrope",
    **ROPE,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 128,
}
LLAMA3 = {
    "rope_type": "llama3",
    **ROPE,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN = {"rope_type": "yarn", **ROPE, "factor": 4.0, "original_max_position_embeddings": 64}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "decoder_sparse_step": 1,
}
CPU = torch.device("cpu")


class Kernel(PlainKernel):
    """Attention without operations, as the GPU's kernel is none of torch's."""

    def __call__(self, q, *rest, **options):
        return torch.zeros_like(q)

    def move(self, *slots):
        """Move nothing."""


def run_static_pass(target):
    """Run the operations that a capture records."""
    rows = causal_rows(range(1, 6), target.new_cache(None, 64))
    static = StaticPass(target.graphs._size(rows), target.kv_pool, Kernel(), target.graphs._group)
    static.fill(rows)
    target.graphs._move_and_compute(static)


def make_model(kind, **changes):
    """Build a tiny model of any of transformers' kinds."""
    experts = changes.pop("experts_implementation", None)
    config = CONFIG_MAPPING[kind](**{**tiny_models.SIZES, **changes})
    options = {} if experts is None else {"experts_implementation": experts}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, **options).eval()


# Which passes may be captured.


@pytest.mark.parametrize("family", sorted(tiny_models.FAMILIES))
def test_passes_of_every_family_may_be_captured(family):
    target = static_target(family)
    assert not capture_obstacle(target._static.eager)
    with torch.inference_mode(), SynchronizationGuard():
        run_static_pass(target)


KINDS = {
    "llama3": ("llama", {"rope_parameters": LLAMA3}),
    "yarn": ("llama", {"rope_parameters": YARN}),
    "longrope": ("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 128}),
    "dynamic": ("llama", {"rope_parameters": DYNAMIC}),
    "mixtral": ("mixtral", EXPERTS),
    "mixtral, eager": ("mixtral", {**EXPERTS, "experts_implementation": "eager"}),
    "mixtral, batched": ("mixtral", {**EXPERTS, "experts_implementation": "batched_mm"}),
    "qwen3_moe": ("qwen3_moe", EXPERTS),
    "olmoe": ("olmoe", EXPERTS),
    "granitemoe": ("granitemoe", EXPERTS),
    **{
        kind: (kind, {})
        for kind in ("olmo2", "granite", "cohere", "starcoder2", "stablelm", "smollm3")
    },
}


@pytest.mark.parametrize("name", KINDS)
def test_what_is_known_before_is_what_a_capture_finds(name):
    """Of every kind of rope and experts, in torch's own mode for tensors without values."""
    kind, changes = KINDS[name]
    model = make_model(kind, **changes)
    target = HuggingFaceModel(model, self_check=False, pack=False)
    target.enable_graphs(Kernel, capture=False)
    network, ids = target._static.eager, torch.zeros(1, 8, dtype=torch.int64)

    def compute(tokens):
        static = static_of(tokens)
        return target._static.compute(static)

    with torch.inference_mode():
        obstacle = capture_obstacle(network)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            try:
                compute(mode.from_tensor(ids))
                found = ""
            except Exception as error:
                found = type(error).__name__
    assert bool(found) == bool(obstacle), (found, obstacle)
    assert bool(found) == (name == "dynamic")


def static_of(tokens):
    """A static pass that is nothing but its inputs."""
    static = object.__new__(StaticPass)
    static.token_ids = static.positions = tokens
    static.size = type("Size", (), {"has_masks": False})
    return static


def test_a_pass_that_waits_for_the_device_is_refused_before_its_capture():
    target = static_target(model=make_tiny_model("llama", rope_parameters=DYNAMIC))
    with (
        torch.inference_mode(),
        pytest.raises(CaptureError, match="waits for the device"),
        SynchronizationGuard(),
    ):
        run_static_pass(target)
    model = HuggingFaceModel(target.model, self_check=False)
    model.enable_graphs(PlainKernel, capture=True)
    assert model.graphs is None, "the configuration tells that, so nothing is captured"


def test_selecting_by_a_mask_waits_for_the_device():
    numbers, mask = torch.arange(4), torch.tensor([True, False, True, False])
    with torch.inference_mode(), SynchronizationGuard():
        assert numbers[torch.tensor([0, 2])].shape == (2,)  # by numbers is allowed
    for select in (lambda: numbers[mask], lambda: torch.unique(numbers)):
        with (
            torch.inference_mode(),
            pytest.raises(CaptureError, match="waits"),
            SynchronizationGuard(),
        ):
            select()


@pytest.mark.parametrize("shape", [(), (2,)])
def test_numbers_of_the_device_may_not_be_copied_to_the_host(shape):
    """A meta tensor stands for the device's: copies between it and the host are dispatched."""
    here, there = torch.zeros(shape), torch.zeros(shape, device="meta")
    assert _crosses_devices((there,), here)
    assert _crosses_devices((here, there), here)
    assert not _crosses_devices((here,), here)
    # A number is written into a tensor of the device without a copy; more numbers are copied.
    assert _crosses_devices((there, here), there) == bool(shape)
    with torch.inference_mode(), SynchronizationGuard():
        there.clone()
    if shape:
        with (
            torch.inference_mode(),
            pytest.raises(CaptureError, match="between the host"),
            SynchronizationGuard(),
        ):
            here.to("meta")


def test_experts_that_wait_for_the_device_are_exchanged(monkeypatch):
    def chosen(implementation, device=CPU, dtype=torch.float32):
        network = make_model("mixtral", **EXPERTS, experts_implementation=implementation)
        rows = use_capturable_experts(network, device, dtype)
        return network.config._experts_implementation, rows

    for implementation in ("eager", "grouped_mm", "batched_mm"):
        found, rows = chosen(implementation)
        assert found == "batched_mm"
        assert rows > 256, "the experts of a tiny model are small"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    hopper, half = torch.device("cuda"), torch.bfloat16
    assert chosen("grouped_mm", hopper, half) == ("grouped_mm", None)
    monkeypatch.setattr("ragaccel.models.capture_safety.memory_share", lambda *_: 65_536)
    of_a_row = 2 * 2 * 64 * 32 * 4  # two experts' gate and up, in float32
    assert chosen("grouped_mm", hopper) == ("batched_mm", 65_536 // of_a_row)
    assert use_capturable_experts(make_model("llama"), CPU, torch.float32) is None


def test_a_wide_pass_of_batched_experts_is_launched(monkeypatch):
    monkeypatch.setattr("ragaccel.models.capture_safety.memory_share", lambda *_: 1 << 17)
    target = HuggingFaceModel(make_model("mixtral", **EXPERTS), self_check=False, pack=False)
    target.enable_graphs(PlainKernel, capture=False)
    assert target.graphs.supports(causal_rows(range(4), target.new_cache(None, 64)))
    assert not target.graphs.supports(causal_rows(range(5), target.new_cache(None, 64)))


def test_offloaded_weights_are_an_obstacle():
    model = make_tiny_model("llama", torch.float32)
    assert not capture_obstacle(model)
    model.lm_head._hf_hook = type("Hook", (), {"offload": True})
    assert capture_obstacle(model) == "a part of its weights is offloaded"


# Captures, simulated.


class Stream:
    """A stream that is current inside its context."""

    current, waited_for, waits = None, None, 0

    def __init__(self, device=None):
        self.device = device

    def wait_stream(self, other):
        """Record that the stream outside a capture waits for the capture's."""
        if other is Stream.waited_for:
            Stream.waits += 1
        Stream.waited_for = self

    def __enter__(self):
        self.before, Stream.current = Stream.current, self

    def __exit__(self, *error):
        Stream.current = self.before


class Graph:
    """A graph whose capture ends in an error if the pass invalidated it, as torch's does."""

    is_invalid = False

    def __init__(self):
        self.pools = []

    def capture_begin(self, pool, capture_error_mode):
        assert capture_error_mode == "thread_local"
        assert Stream.current is not None
        Device.log.append(("begin", pool))

    def capture_end(self):
        Device.log.append("end")
        if Graph.is_invalid:
            raise RuntimeError("operation failed due to a previous error during capture")


class Generator:
    """The random generator of a device."""

    def clone_state(self):
        return "the state before"

    def graphsafe_set_state(self, state):
        Device.log.append(("random", state))


class Device:
    """What happens on the simulated device, in order."""

    log = ()
    mode = 0


@pytest.fixture
def device(monkeypatch):
    Device.log, Device.mode, Graph.is_invalid, Stream.current = [], 0, False, None
    Stream.waited_for, Stream.waits = None, 0
    handles = iter(range(1, 9))
    for name, value in {
        "device": lambda _: nullcontext(),
        "Stream": Stream,
        "stream": lambda stream: stream,
        "current_stream": Stream,
        "synchronize": lambda *_: None,
        "CUDAGraph": Graph,
        "graph_pool_handle": lambda: (next(handles), 0),
        "default_generators": [Generator()],
        "get_sync_debug_mode": lambda: Device.mode,
        "set_sync_debug_mode": lambda mode: setattr(Device, "mode", mode),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    for name, told in (("_cuda_endAllocateToPool", "leave"), ("_cuda_releasePool", "release")):
        monkeypatch.setattr(
            torch._C,
            name,
            lambda at, pool, told=told: Device.log.append((told, at, pool)),
            raising=False,
        )
    return torch.device("cuda", 0)


def test_captures_share_a_pool_and_a_stream_of_their_device(device):
    recorder, streams, result = GraphRecorder(device), set(), torch.ones(2)

    def compute():
        streams.add(Stream.current)
        return result

    for _ in range(2):
        graph, logits = recorder.record(compute)
        assert isinstance(graph, Graph)
        assert logits is result
    recorder.forget_pool()
    recorder.record(compute)
    assert [one.device for one in streams] == [device]
    assert Device.log == [("begin", (1, 0)), "end"] * 2 + [("begin", (2, 0)), "end"]
    assert (Stream.current, Device.mode) == (None, 0)


@pytest.mark.parametrize("invalid", [False, True])
def test_a_failed_capture_is_ended_and_leaves_nothing(device, invalid):
    recorder, runs = GraphRecorder(device), []

    def compute():
        runs.append(Stream.current)
        if len(runs) > 2:
            Graph.is_invalid = invalid
            raise ValueError("it cannot be captured")
        return torch.ones(2)

    with pytest.raises(ValueError, match="it cannot be captured"):
        recorder.record(compute)
    restored = [("random", "the state before"), ("leave", 0, (1, 0)), ("release", 0, (1, 0))]
    assert Device.log == [("begin", (1, 0)), "end", *(restored if invalid else [])]
    assert Stream.current is None
    assert len(set(runs)) == 1


@pytest.mark.parametrize("failing", [1, 2, 3, None])
def test_later_work_waits_for_the_captures_stream_even_if_memory_runs_out(device, failing):
    """Inputs that are freed then may be written again while that stream still reads them."""
    runs = []

    def compute():
        runs.append(Stream.current)
        if len(runs) == failing:
            raise torch.OutOfMemoryError("out of memory")
        return torch.ones(2)

    with nullcontext() if failing is None else pytest.raises(torch.OutOfMemoryError):
        GraphRecorder(device).record(compute)
    assert Stream.waits == 1
    assert Stream.current is None


def test_a_capture_that_an_operation_invalidated_in_silence_is_undone_too(device):
    def compute():
        Graph.is_invalid = bool(Device.log)
        return torch.ones(2)

    with pytest.raises(RuntimeError, match="previous error"):
        GraphRecorder(device).record(compute)
    assert Device.log[2] == ("random", "the state before")
    assert Stream.current is None


def test_a_pool_that_torch_has_left_is_not_released_again(device, monkeypatch):
    def left(*_):
        raise RuntimeError("not currently recording to this pool")

    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", left, raising=False)

    def compute():
        Graph.is_invalid = bool(Device.log)
        return torch.ones(2)

    with pytest.raises(RuntimeError, match="previous error"):
        GraphRecorder(device).record(compute)
    assert ("release", 0, (1, 0)) not in Device.log


def waits():
    """Warn as torch does in its mode for synchronizing operations."""
    if Device.mode == "warn":
        warnings.warn("called a synchronizing CUDA operation (Triggered internally)", stacklevel=1)


def test_a_pass_that_waits_inside_an_operation_is_never_captured(device):
    def compute():
        waits()
        return torch.ones(2)

    with pytest.raises(CaptureError, match="waits for the device"):
        GraphRecorder(device).record(compute)
    assert Device.log == []
    assert Device.mode == 0


def test_what_other_threads_wait_for_and_other_warnings_do_no_harm(device):
    told = []

    def tell():
        waits()
        warnings.warn("something else", stacklevel=1)

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with watch_synchronization():
            thread = Thread(target=tell)
            thread.start()
            thread.join()
            told.append(Device.mode)
    assert told == ["warn"]
    assert [str(one.message) for one in seen] == ["something else"]


@contextmanager
def compiled(recorder):
    recorder.guards_warm_up = False
    yield recorder


def test_compiled_passes_are_watched_without_torchs_dispatch(device):
    seen = []

    def compute():
        seen.append(torch.utils._python_dispatch._get_current_dispatch_mode())
        return torch.ones(2)

    GraphRecorder(device).record(compute)
    with compiled(GraphRecorder(device)) as recorder:
        recorder.record(compute)
    guarded = [isinstance(mode, SynchronizationGuard) for mode in seen]
    assert guarded == [False, True, False, False, False, False]


def test_a_pass_that_fails_on_the_device_itself_raises_its_error(monkeypatch, device):
    """A sticky error, such as an illegal access, is raised by every later call, not swallowed."""
    target = static_target(model=make_tiny_model("llama", torch.float32))
    monkeypatch.setattr(target.graphs, "_capture", True)
    monkeypatch.setattr(type(target.graphs), "_capture_graph", fail_on_device)
    target.kv_pool.layout = replace(target.kv_pool.layout, device=device)
    monkeypatch.setattr(torch.cuda, "synchronize", fail_on_device)
    rows = causal_rows(range(5), target.new_cache(None, 64))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        target.graphs._capture_or_raise(rows)


def fail_on_device(*_):
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


# A model whose passes are not replayed says so.


class Broken(Kernel):
    """A kernel that Triton cannot compile."""

    def __call__(self, *args, **options):
        raise RuntimeError("Failed to find C compiler")


KERNELS = {
    "Failed to find C compiler": Broken,
    "deviates from plain decoding": Kernel,  # it gives wrong logits
    "triton is not installed": None,
}


@pytest.mark.parametrize("cause", KERNELS)
def test_a_kernel_that_fails_or_is_wrong_is_told_at_once(monkeypatch, caplog, cause):
    def kernels():
        if KERNELS[cause] is None:
            raise CaptureError("triton is not installed: pip install triton")
        return KERNELS[cause], None

    def make_graphs(*args, capture, layers):
        return static_network.make_graphs(*args, capture=False, layers=layers)

    monkeypatch.setattr("ragaccel.models.hf_model.triton_kernels", kernels)
    monkeypatch.setattr("ragaccel.models.hf_model.make_graphs", make_graphs)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    target = HuggingFaceModel(make_tiny_model("llama", torch.float32))
    assert target.graphs_status == ""
    target._make_graphs(expected_passes(target))
    assert target.graphs is None
    assert target.graphs_status.startswith("off: ")
    assert cause in target.graphs_status
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert cause in record.message


class BrokenLayers(PlainLayers):
    """Kernels for layers of which one cannot be compiled."""

    def gate(self, *args):
        raise RuntimeError("Failed to find C compiler")


def test_graphs_go_on_without_fused_layers_that_fail(monkeypatch, caplog):
    def make_graphs(*args, capture, layers):
        return static_network.make_graphs(*args, capture=False, layers=layers)

    kernels = [PlainKernel, BrokenLayers()]
    monkeypatch.setattr("ragaccel.models.hf_model.triton_kernels", lambda: kernels)
    monkeypatch.setattr("ragaccel.models.hf_model.make_graphs", make_graphs)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    target = HuggingFaceModel(make_tiny_model("llama", torch.float32))
    expected = expected_passes(target)
    target._make_graphs(expected)
    assert (target.graphs_status, target._static.is_fused) == ("on", False)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "without fused layers" in record.message
    assert "Failed to find C compiler" in record.message
    kernels[1] = PlainLayers()
    target._make_graphs(expected)
    assert (target.graphs_status, target._static.is_fused) == ("on", True)
    assert len(caplog.records) == 1


def test_a_second_kv_pool_is_made_only_after_the_first_is_freed(monkeypatch, caplog):
    pools = []

    def make_graphs(*args, capture, layers):
        gc.collect()
        pools.append(sum(pool() is not None for pool in made))
        found = static_network.make_graphs(*args, capture=False, layers=layers)
        made.append(weakref.ref(found[0]))
        return found

    made = []
    monkeypatch.setattr(
        "ragaccel.models.hf_model.triton_kernels", lambda: (PlainKernel, BrokenLayers())
    )
    monkeypatch.setattr("ragaccel.models.hf_model.make_graphs", make_graphs)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    target = HuggingFaceModel(make_tiny_model("llama", torch.float32))
    target._make_graphs(expected_passes(target))
    assert target.graphs_status == "on"
    assert pools == [0, 0]
    assert len(caplog.records) == 1


def test_a_device_too_full_for_a_kv_pool_answers_without_graphs(monkeypatch, caplog):
    def make_graphs(*args, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(
        "ragaccel.models.hf_model.triton_kernels", lambda: (PlainKernel, PlainLayers())
    )
    monkeypatch.setattr("ragaccel.models.hf_model.make_graphs", make_graphs)
    model = make_tiny_model("llama", torch.float32)
    target = HuggingFaceModel(model)
    target._make_graphs(expected_passes(target))
    assert target.graphs_status == "off: CUDA out of memory"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    prompt = random_prompt(9)
    wanted = generate(model, prompt, 12)
    assert decode(Engine(target), Request(prompt, max_new_tokens=12)) == wanted


def test_a_model_without_kernels_for_its_dtype_says_so(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    target = HuggingFaceModel(make_tiny_model("llama"), self_check=False)
    target._make_graphs(None)
    assert target.graphs_status == "off: there are no kernels for torch.float64"
    assert len(caplog.records) == 1
