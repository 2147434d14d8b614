"""Mistakes in the options of the strategy and of the Trainer."""

import torch
import zoo
from lightning.pytorch.plugins.precision import DoublePrecision, MixedPrecision, TransformerEnginePrecision
from torch.amp import GradScaler

from lightning_roundpipe import RoundPipePrecision
from mistakes.user import Mistake, options, trainer


class LooksAtGradients(zoo.PlainClassifier):
    def on_after_backward(self):
        float(self.model.head.weight.grad.norm())


def _with_a_scripted_head():
    module = zoo.make_module("mlp")
    module.model.head = torch.jit.script(module.model.head)
    return module


SECTION = "Microbatches"
MICROBATCHES = [
    Mistake(SECTION, "both sizes of microbatches are set", "num_microbatches=… and microbatch_size=… are both set",
        "set only one of them", (options(num_microbatches=2, microbatch_size=2),)),
    Mistake(SECTION, "`num_microbatches` is no number, 0 or negative", "num_microbatches=… must be",
        "a whole number of at least 1", tuple(options(num_microbatches=n) for n in (0, "2"))),
    Mistake(SECTION, "`microbatch_size` is no number, 0 or negative", "microbatch_size=… must be",
        "a whole number of at least 1", tuple(options(microbatch_size=n) for n in (0, "all"))),
    Mistake(SECTION, "`round_microbatches` is no number, 0 or negative", "round_microbatches=… must be",
        "a whole number of at least 1", tuple(options(round_microbatches=n) for n in (0, "4"))),
    Mistake(SECTION, "`loss_weight` is none of its values", "loss_weight=… must be 'targets'",
        "'sum' (the losses of a batch's parts add up), a function of a microbatch, or None",
        (options(loss_weight=3), options(loss_weight="tokens"))),
    Mistake(SECTION, "`loss_weight` gives something other than a number", "loss_weight returned … for microbatch 0",
        "it must give one number",
        tuple(options(loss_weight=weigh) for weigh in (lambda _: "many", lambda part: part["y"], lambda _: 10**400))),
    Mistake(SECTION, "`loss_weight` gives weights that are negative, not finite, or all 0",
        "loss_weight returned … for the microbatches", "weights must be finite, at least 0, and not all 0",
        tuple(options(loss_weight=lambda part, w=w: w) for w in (-1, 0, float("nan")))),
]  # fmt: skip

SECTION = "Layers and plans"
PLANS = [
    Mistake(SECTION, "`layers` names what the module has not got", "layers='…' matches no module of …",
        "Give a module class, a class name or a qualified module name",
        (options(layers=["NoSuchLayer"]), options(layers=["ResidualBlock", "model.blocks.17"]))),
    Mistake(SECTION, "`layers` names a module compiled by TorchScript",
        "layers='…' names a module compiled by TorchScript", "give the LightningModule the module itself",
        (lambda user: user.fit(_with_a_scripted_head(), layers=["model.head"]),)),
    Mistake(SECTION, "`layers` is no list of names or classes, or an empty one", "layers=… must be",
        "a list of module classes, class names or qualified module names",
        tuple(options(layers=given) for given in ([], "ResidualBlock", [3]))),
    Mistake(SECTION, "`layers` names a container that is never called",
        "layers='…' names a ModuleList, which is never called as a whole", "name its items",
        (options(layers=["ModuleList"]), options(layers=["model.blocks"]))),
    Mistake(SECTION, "`layers` names one module inside another one",
        "layers='…' lies inside '…', which layers= names too", "Take one of the two out",
        (options(layers=["model.blocks.0", "model.blocks.0.up"]),)),
    Mistake(SECTION, "`plan` leaves out a call, has one twice, has more than the trace, or has stages in another order",
        "plan: the … pass must run each of the … of the trace once, in order", "leave plan= unset to have one made",
        (options(plan="forward 0-1; fused 3-5; backward 0-2; round 2"),)),
    Mistake(SECTION, "`plan` carries calls of the fused stage, or none of the trace",
        "plan: carry … names call …, which no backward stage runs", "Leave it out",
        tuple(options(plan=f"forward 0-3; fused 4-5; backward 0-3; round 2; carry {calls}") for calls in ("3-4", "6"))),
    Mistake(SECTION, "`plan` lacks a part, has one twice, or is no plan at all", "plan: '…' is no plan",
        "expected text like 'forward …; fused …; backward …; round 4'",
        (options(plan="first this, then that"),)),
    Mistake(SECTION, "`plan` has a range backwards", "plan: … is not a span of calls",
        "write the lower call first, counting from 0",
        (options(plan="forward 0-3; fused 4-5; backward 3-0; round 2"),)),
    Mistake(SECTION, "`plan` has something else than a range", "plan: '…' is not a span of calls",
        "write a call's number, like 5, or a range, like 4-7",
        (options(plan="forward 0-3; fused 4-5; backward 0-99999999999; round 2"),)),
    Mistake(SECTION, "`plan` has rounds without a microbatch", "plan: round 0 would run no microbatch", "use 1 or more",
        (options(plan="forward 0-3; fused 4-5; backward 0-3; round 0"),)),
    Mistake(SECTION, "`plan` is no text", "plan=… must be", "'measured', 'static' or stages as text",
        (options(plan=3), options(plan=["forward 0-3"]))),
    Mistake(SECTION, "`plan` is a word, and no policy", "plan=… is neither 'measured' nor 'static' nor stages as text",
        "Did you mean '…'?", tuple(options(plan=word) for word in ("statik", "MEASURED"))),
    Mistake(SECTION, "`plan` and `round_microbatches` contradict each other",
        "plan: it says 'round …', and round_microbatches=…", "set only the plan",
        (options(plan="forward 0-3; fused 4-5; backward 0-3; round 2", round_microbatches=3),)),
    Mistake(SECTION, "`stage_seconds` is no number, not finite, 0 or negative", "stage_seconds=… must be",
        "a number of more than 0 seconds; None lets stages take any time",
        tuple(options(stage_seconds=s) for s in (0, "long", float("nan"), float("inf"), 1e300))),
    Mistake(SECTION, "`stage_seconds` and `plan` are both set",
        "stage_seconds=… says how long stages may be, and plan= says where each ends", "set only one of them",
        (options(stage_seconds=1.0, plan="forward 0-3; fused 4-5; backward 0-3; round 2"),)),
    Mistake(SECTION, "`stage_seconds` is set, and `plan` is `static`",
        "stage_seconds=… counts the seconds that the first batch takes, and plan='static' does not measure any",
        "set plan='measured', or leave stage_seconds out", (options(stage_seconds=1.0, plan="static"),)),
    Mistake(SECTION, "`stage_seconds` is less than a layer takes",
        "stage_seconds=… is shorter than one layer takes for a microbatch: '…' … s",
        "Raise stage_seconds above that, lower microbatch_size, or name smaller modules in layers=",
        (options(stage_seconds=1e-9, num_microbatches=2),)),
    Mistake(SECTION, "`compile_layers` is neither yes nor no nor a mapping",
        "compile_layers=… must be True, False or a mapping of arguments for torch.compile",
        "such as {'backend': 'inductor', 'dynamic': True}", tuple(options(compile_layers=c) for c in ("inductor", 1))),
    Mistake(SECTION, "`compile_layers` has a setting that says what is compiled, or none of `torch.compile`",
        "compile_layers has no setting '…'", "it has backend, dynamic, fullgraph, mode, options",
        (options(compile_layers={"disable": True}), options(compile_layers={"speed": "high"}))),
    Mistake(SECTION, "`compile_layers` has `options` that are no mapping",
        "compile_layers['options']=… must be a mapping of settings of the backend", "such as {'max_autotune': True}",
        (options(compile_layers={"options": "fast"}), options(compile_layers={"options": ["fast"]}))),
    Mistake(SECTION, "`compile_layers` asks for CUDA graphs",
        "compile_layers=… asks for CUDA graphs, which keep the addresses of weights",
        "use mode='max-autotune-no-cudagraphs', or no mode, and no such backend",
        (
            options(compile_layers={"mode": "reduce-overhead"}),
            options(compile_layers={"mode": "max-autotune"}),
            options(compile_layers={"backend": "cudagraphs"}),
            options(compile_layers={"options": {"triton.cudagraphs": True}}),
        )),
    Mistake(SECTION, "`compile_layers` names a backend or a mode that torch has not got",
        "compile_layers=… is refused by torch.compile", "Use what torch.compile takes",
        (options(compile_layers={"backend": "fastest"}), options(compile_layers={"mode": "fastest"}))),
]  # fmt: skip

SECTION = "Memory"
MEMORY = [
    Mistake(SECTION, "`memory_budget` is no size", "memory_budget=… is not a size",
        "write it like '20GiB', '512MB' or 1000000",
        tuple(options(memory_budget=b) for b in ("plenty", "-5GiB", True))),
    Mistake(SECTION, "`memory_budget` is 0 or negative", "memory_budget=… must be", "at least 1 byte",
        tuple(options(memory_budget=b) for b in (0, "0GiB"))),
    Mistake(SECTION, "`memory_budget` is a small number without a unit",
        "memory_budget=… says bytes, as it has no unit", "write memory_budget=20GiB",
        tuple(options(memory_budget=b) for b in (20, "20"))),
    Mistake(SECTION, "`memory_budget` is neither a fraction nor whole bytes",
        "memory_budget=… is neither a fraction of the device's memory (up to 1.0) nor whole bytes",
        "write 0.9, 2000000000 or '20GiB'", tuple(options(memory_budget=b) for b in (1.5, float("nan")))),
    Mistake(SECTION, "`memory_budget` is a fraction of emulated memory without a limit",
        "memory_budget=… is a fraction, and emulated devices have no limit to take it of",
        "give a size such as '2GiB', or set emulation.memory",
        (options(memory_budget=0.5), options(memory_budget=1.0))),
    Mistake(SECTION, "`memory_budget` is smaller than the largest module that cannot be cut",
        "layer '…' is too large: workers may use … bytes", "Raise memory_budget, or train adapters instead of it",
        (
            options(memory_budget="2KB", layers=None),
            options(memory_budget=0.5, emulation={"memory": "4KB"}, layers=None),
        )),
    Mistake(SECTION, "`memory_budget` is smaller than a layer that `layers` names, which is not cut",
        "layer '…' is too large: workers may use … bytes", "Raise memory_budget, or name smaller modules in layers=",
        (options(memory_budget="2KB"),)),
    Mistake(SECTION, "the device's memory is smaller than the largest module that cannot be cut",
        "layer '…' is too large: workers may use … bytes",
        "Raise emulation.memory (or use devices with more memory), or train adapters instead of it",
        (options(emulation={"memory": "2KB"}, layers=None),)),
    Mistake(SECTION, "`memory_budget` holds the largest layer, but not what its call computes",
        "memory_budget: workers may use … bytes, and a cut at every layer needs …", "Set memory_budget=",
        (
            lambda user: user.fit(
                batches=zoo.make_batches("mlp", 2, samples=600), num_microbatches=4, memory_budget="80KB"
            ),
        )),
    Mistake(SECTION, "`plan` needs more than `memory_budget`", "plan: it needs … bytes on each worker",
        "Cut it into more stages or smaller rounds, or raise memory_budget",
        (options(plan="forward none; fused 0-5; backward none; round 4", memory_budget="90KB"),)),
]  # fmt: skip

SECTION = "Other options"
OTHERS = [
    Mistake(SECTION, "`staleness=1`, and a hook needs gradients, or the optimizer steps all parameters together",
        "staleness=1 applies updates while the next step runs, which is not possible",
        "Set staleness=0, or change that",
        (lambda user: user.fit(LooksAtGradients(zoo.make_module("mlp").model), staleness=1),)),
    Mistake(SECTION, "`staleness` is neither 0 nor 1", "staleness=… must be", "0 (exact training) or 1",
        tuple(options(staleness=given) for given in (2, "0"))),
    Mistake(SECTION, "`overlap` is neither true nor false", "overlap=… must be", "True or False",
        (options(overlap="no"), options(overlap=0))),
    Mistake(SECTION, "`evaluation_batches` is no number, 0 or negative", "evaluation_batches=… must be",
        "a whole number of at least 1", tuple(options(evaluation_batches=n) for n in (0, None))),
    Mistake(SECTION, "`prefetch` is neither 0 nor 1", "prefetch=… must be", "0 or 1",
        tuple(options(prefetch=given) for given in (2, True))),
    Mistake(SECTION, "`reduce_dtype` is no format for gradients",
        "reduce_dtype=… is no format that gradients can travel in", "set 'bfloat16' for half the bytes",
        tuple(options(reduce_dtype=given) for given in ("bf16", torch.int8))),
    Mistake(SECTION, "`reduce_dtype='float16'`, and no loss scale", "reduce_dtype='float16' with precision=…",
        "Set reduce_dtype='bfloat16'",
        (lambda user: user.fit(zoo.make_module("mlp"), zoo.make_batches("mlp", 1), reduce_dtype="float16"),)),
    Mistake(SECTION, "`token_tiles` is no number of tokens",
        "token_tiles=… must be a whole number of tokens of at least 1",
        "such numbers, as {'mlp': 1024}, or None for no tiles",
        tuple(options(token_tiles=tiles) for tiles in (0, "auto", {"mlp": 0.5}, {"": 3}))),
    Mistake(SECTION, "`token_tiles` and `compile_layers`", "token_tiles=… and compile_layers are both set",
        "set only one of them", (options(token_tiles=1024, compile_layers=True),)),
    Mistake(SECTION, "`pin_memory` is none of its values", "pin_memory=… must be", "'auto', 'on' or 'off'",
        (options(pin_memory="maybe"), options(pin_memory=1))),
    Mistake(SECTION, "`watchdog_timeout` is no number, 0 or negative", "watchdog_timeout=… must be",
        "a number of more than 0 seconds", tuple(options(watchdog_timeout=given) for given in (0, None))),
    Mistake(SECTION, "`carry_products` is neither true nor false", "carry_products=… must be",
        "True (products of the forward go to the host and back",
        (options(carry_products="yes"), options(carry_products=1))),
    Mistake(SECTION, "`optimizer_device` is neither cpu nor worker", "optimizer_device=… must be",
        "'cpu', or 'worker' to step on workers' devices what the host has no fused kernel for",
        (options(optimizer_device="cuda"), options(optimizer_device=None))),
    Mistake(SECTION, "`optimizer_state` is none of its values",
        "optimizer_state=… is no form of an optimizer's moments",
        "set 'fp32', which is exact, 'bf16' for half the bytes, or 'int8' for a quarter",
        (options(optimizer_state="fp16"), options(optimizer_state=["int8"]))),
    Mistake(SECTION, "`optimizer_device=worker`, and moments in fewer bytes",
        "optimizer_state=… is for the host's fused kernel of Adam and AdamW", "set only one of them",
        (options(optimizer_device="worker", optimizer_state="bf16"),)),
    Mistake(SECTION, "`optimizer_device=worker`, and the host has a fused kernel for all, or the step blocks",
        "optimizer_device='worker' has workers step, layer by layer, what the host has no fused kernel for",
        "Set optimizer_device='cpu', or change that",
        (
            lambda user: user.fit(zoo.make_module("mlp"), optimizer_device="worker"),
            lambda user: user.fit(LooksAtGradients(zoo.make_module("mlp").model), optimizer_device="worker"),
        )),
    Mistake(SECTION, "`shard_optimizer` is neither true nor false", "shard_optimizer=… must be",
        "True (on several machines, each has the optimizer's state of some layers) or False",
        (options(shard_optimizer="yes"), options(shard_optimizer=1))),
    Mistake(SECTION, "`network_dtype` is not a dtype that gradients travel in between machines",
        "network_dtype=… must be", "'bfloat16' (half the bytes between machines, rounded) or None",
        (options(network_dtype="float16"), options(network_dtype="int8"))),
    Mistake(SECTION, "`machine_timeout` is no number, or less than 5", "machine_timeout=… must be",
        "a number of at least 5 seconds", tuple(options(machine_timeout=given) for given in ("60", 1))),
    Mistake(SECTION, "`emulation` is no mapping", "emulation=… must be", "a mapping such as {'memory': '2GiB'}",
        (options(emulation="slow"), options(emulation=["memory"]))),
    Mistake(SECTION, "`emulation` has a setting that there is not", "emulation has no setting '…'",
        "it has bandwidth, delay_seed, latency, memory, poison", (options(emulation={"speed": 3}),)),
    Mistake(SECTION, "`emulation.memory` or `.bandwidth` is no size", "emulation.… is not a size",
        "write it like '20GiB', '512MB' or 1000000",
        (options(emulation={"memory": "much"}), options(emulation={"bandwidth": "fast"}))),
    Mistake(SECTION, "`emulation.latency` is no number or negative", "emulation.latency=… must be", "0 or more seconds",
        tuple(options(emulation={"latency": given}) for given in (-1, "1ms"))),
    Mistake(SECTION, "`emulation.poison` is neither true nor false", "emulation.poison=… must be", "True or False",
        (options(emulation={"poison": "yes"}),)),
    Mistake(SECTION, "`emulation.delay_seed` is no number", "emulation.delay_seed=… must be",
        "a whole number, or None for no delays", (options(emulation={"delay_seed": "random"}),)),
]  # fmt: skip


def _launched(num_nodes=1, /, **variables):
    def way(user):
        for name, value in variables.items():
            user.monkeypatch.setenv(name, value)
        user.fit(trainer={"num_nodes": num_nodes})

    return way


def _manually_on_several_machines(user):
    user.monkeypatch.setenv("NODE_RANK", "0")
    module = zoo.make_module("mlp")
    module.automatic_optimization = False
    user.fit(module, trainer={"num_nodes": 2})


def _lbfgs_in_fp16(user):
    module = zoo.make_module("mlp")
    module.make_optimizer = torch.optim.LBFGS
    user.fit(module, trainer={"plugins": [MixedPrecision("16-mixed", "cpu")]})


SECTION = "The Trainer"
TRAINER = [
    Mistake(SECTION, "`accumulate_grad_batches` is 0 or no whole number",
        "accumulate_grad_batches=… must be", "a whole number of batches, at least 1",
        tuple(trainer(accumulate_grad_batches=n) for n in (0, 2.5, "2"))),
    Mistake(SECTION, "a precision that is not supported", "precision='…' is not supported by the roundpipe strategy",
        "use 32-true, 64-true, bf16-mixed, bf16-true, 16-mixed or 16-true. For fp8 products, "
        "also convert the model's layers with torchao.float8.convert_to_float8_training",
        (
            lambda user: RoundPipePrecision("transformer-engine"),
            trainer(plugins=[object.__new__(TransformerEnginePrecision)]),
        )),
    Mistake(SECTION, "a precision plugin", "plugins=[…(...)] brings a precision plugin",
        "take it out and set precision= to 32-true, 64-true, bf16-mixed, bf16-true, 16-mixed or 16-true",
        (trainer(plugins=[type("Mine", (DoublePrecision,), {})()]),)),
    Mistake(SECTION, "a scaler where no loss is scaled", "precision='…' does not scale losses",
        "leave out scaler=, or set 16-mixed", (lambda user: RoundPipePrecision("bf16-true", GradScaler("cpu")),)),
    Mistake(SECTION, "LBFGS in fp16",
        "precision='…' skips steps whose gradients overflow, and LBFGS computes gradients within its step",
        "use another optimizer, or a bf16 precision", (_lbfgs_in_fp16,)),
    Mistake(SECTION, "several processes, and `num_nodes` is 1",
        "the roundpipe strategy runs in one process on a machine, and … were asked for",
        "start the script with plain `python`",
        (
            _launched(WORLD_SIZE="2"),
            _launched(WORLD_SIZE="2", RANK="0", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29999"),
        )),
    Mistake(SECTION, "more or fewer processes than machines",
        "num_nodes=…, and the launcher has started …, … on this machine",
        "Start it with `torchrun --nnodes=2 --nproc-per-node=1`",
        (
            _launched(2, WORLD_SIZE="4", NODE_RANK="0"),
            _launched(2, WORLD_SIZE="2", NODE_RANK="0", LOCAL_WORLD_SIZE="2"),
        )),
    Mistake(SECTION, "several machines, and no launcher", "num_nodes=…, and nothing says which machine this is",
        "or set NODE_RANK (0 to 1), MASTER_ADDR and MASTER_PORT on each machine",
        (trainer(num_nodes=2), _launched(2, NODE_RANK="2"))),
    Mistake(SECTION, "manual optimization on several machines", "automatic_optimization=False with several machines",
        "Set num_nodes=1, or automatic_optimization=True", (_manually_on_several_machines,)),
    Mistake(SECTION, "`sync_batchnorm`",
        "sync_batchnorm=True joins the statistics of several processes, and the roundpipe strategy has one",
        "Set sync_batchnorm=False", (trainer(sync_batchnorm=True),)),
]  # fmt: skip
