"""The names that the package replaces in other libraries are those that the page on the engine lists."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTED_BY = {
    "torch.nn.Module.__setattr__": "test_module_state.py",
    "torch.nn.Module.__delattr__": "test_module_state.py",
    "torch.autograd.function._SingleLevelFunction.apply": "test_bypass.py",
    "torch.autograd.forward_ad.enter_dual_level": "test_kinds_of_modules.py",
    "torch._functorch.eager_transforms.enter_jvp_nesting": "test_kinds_of_modules.py",
    "torch.autograd.graph.disable_saved_tensors_hooks": "test_traps_autograd.py",
    "torch.random.fork_rng": "test_checkpointed_code.py",
    "owner.log": "test_evaluation_window.py",
    "value._forward_cache": "test_logging.py",
    "torch.autocast": "estimates/test_costs_of_shapes.py",
    "transformers.quantizers.auto.AUTO_QUANTIZER_MAPPING": "model/test_quantize.py",
    "gguf.GGUFReader": "model/test_loading.py",
    "warnings.formatwarning": "tasks/test_fine_tuning.py",
    "lightning.fabric.utilities.rank_zero.rank_zero_only.rank": "test_several_machines.py",
    "lightning_utilities.core.rank_zero.rank_zero_only.rank": "test_several_machines.py",
}
"""For each name, the tests that fail when it is no longer what the other library calls."""


def imported(tree):
    """Return what each name stands for that a file imports from elsewhere."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {(a.asname or a.name.partition(".")[0]): a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {(a.asname or a.name): f"{node.module}.{a.name}" for a in node.names}
    found = {name: full for name, full in found.items() if not full.startswith("lightning_roundpipe")}
    for node in ast.walk(tree):  # names that an annotation hides from the type checker
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            found.update((node.target.id, full) for full in full_names(node.value, found))
    return found


def full_names(value, known):
    """Yield the imported objects, and their attributes, in an expression."""
    if isinstance(value, ast.Tuple):
        for part in value.elts:
            yield from full_names(part, known)
    elif isinstance(value, (ast.Attribute, ast.Name)):
        root, _, rest = ast.unparse(value).partition(".")
        if root in known and "(" not in rest:
            yield f"{known[root]}.{rest}".rstrip(".")


def test_replaced_names_are_documented():
    found = set()
    for file in (ROOT / "lightning_roundpipe").rglob("*.py"):
        tree = ast.parse(file.read_text())
        known = imported(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    found.update(full_names(target, known) if not isinstance(target, ast.Name) else ())
            elif not isinstance(node, ast.Call):
                continue
            elif isinstance(node.func, ast.Attribute) and node.func.attr == "update":
                found.update({*full_names(node.func.value, known)} - {"os.environ"})
            elif isinstance(node.func, ast.Name) and node.func.id == "replaced":
                owner = ast.unparse(node.args[0])
                found.update(f"{known.get(owner, owner)}.{keyword.arg}" for keyword in node.keywords if keyword.arg)
    page = (ROOT / "docs" / "engine.md").read_text().partition("## What is replaced in other libraries")[2]
    assert found == TESTED_BY.keys()
    assert all((ROOT / "tests" / file).is_file() for file in TESTED_BY.values())
    assert found == set(re.findall(r"^\| `([\w.]+)` \|", page, re.MULTILINE))
