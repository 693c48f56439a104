"""Read from a Python program's source its flags, the packages that it imports, its variables.

The program is parsed, never imported or run. Flags are those of argparse, click, typer and absl
that the source declares with literal names.
"""

import ast
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from batchml.errors import UsageError
from batchml.model.job import Scalar

_MAX_FILES = 500  # modules of the folder that are read
_MAX_BYTES = 4 * 1024**2  # of one module
_ACTIONS = ("store_true", "store_false", "count", "version", "help", "store_const", "append_const")

FlagKind = Literal["value", "switch", "positional", "several"]


class Flag(Struct, frozen=True):
    """A flag or an argument of the program. `name` has no hyphens in front; `aliases` are its other
    names, with them: `--lr`, `-l`.

    `default` is None without a literal default. `switch`: it takes no value, and `off` is the flag
    that switches it off, if there is one; its default is None if no parameter can stand for it.
    `several`: it takes more than one value, or may be repeated.
    """

    name: str
    kind: FlagKind = "value"
    default: Scalar | None = None
    line: int = 0
    is_required: bool = False
    aliases: tuple[str, ...] = ()
    off: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """All names, as a user writes them."""
        return (f"--{self.name}", *self.aliases)


class ProgramSource(Struct, frozen=True):
    """What the source tells. `imports` are top-level names outside the standard library and the
    folder; `optional` those of them in a `try`. `variables` are the environment variables that it
    reads. `ranks` says which line shows that processes train together; "" if none does.
    `makes_folders`: it seems to make the folders that it writes to.
    """

    flags: tuple[Flag, ...] = ()
    imports: tuple[str, ...] = ()
    optional: frozenset[str] = frozenset()
    variables: tuple[str, ...] = ()
    ranks: str = ""
    makes_folders: bool = False


def read_program(script: Path, folder: Path) -> ProgramSource:
    """Read a program, and the modules below `folder` that it imports.

    Raises UsageError for a program that cannot be read or is no Python of this version.
    """
    tree = _parse(script, is_program=True)
    assert tree is not None
    constants = _constants(tree)
    flags: dict[str, Flag] = {}
    variables: dict[str, None] = {}
    imports: dict[str, bool] = {}  # name -> whether all imports of it are in a `try`
    ranks, makes_folders = "", False
    for module in _local_modules(script, tree, folder):
        for flag in _flags(module, constants):
            flags.setdefault(flag.name, flag)
        variables |= dict.fromkeys(_variables(module))
        ranks = ranks or _find_ranks(module)
        makes_folders = makes_folders or _makes_folders(module)
        for name, is_optional in _imports(module):
            imports[name] = imports.get(name, True) and is_optional
    roots = (script.parent, folder)
    others = {
        name: is_optional
        for name, is_optional in imports.items()
        if name not in sys.stdlib_module_names
        and name not in ("batchml", "__future__")
        and not any(_is_local(name, root) for root in roots)
    }
    return ProgramSource(
        tuple(flags.values()),
        tuple(sorted(others)),
        frozenset(name for name, is_optional in others.items() if is_optional),
        tuple(sorted(variables)),
        ranks,
        makes_folders,
    )


def _parse(path: Path, *, is_program: bool) -> ast.Module | None:
    try:
        with open(path, "rb") as file:
            return ast.parse(file.read(_MAX_BYTES + 1), str(path))
    except SyntaxError as error:
        if is_program:
            where = f", line {error.lineno}" if error.lineno else ""
            version = f"{sys.version_info[0]}.{sys.version_info[1]}"
            raise UsageError(
                f"{path}{where}: not Python {version}: {error.msg}. adopt reads Python programs."
            ) from error
    except (OSError, ValueError) as error:
        if is_program:
            why = error.strerror if isinstance(error, OSError) else error
            raise UsageError(f"{path} cannot be read: {why}.") from error
    return None


def _constants(tree: ast.Module) -> dict[str, Any]:
    """The names that the module gives literal values."""
    found: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target = node.targets[0]
            value = _literal(node.value, found)
            if isinstance(target, ast.Name) and value is not None:
                found[target.id] = value
    return found


def _literal(node: ast.AST | None, constants: Mapping[str, Any]) -> Any:
    """The value of a literal, of a constant of the module, or of arithmetic with numbers."""
    if isinstance(node, ast.Name):
        return constants.get(node.id)
    if isinstance(node, ast.BinOp):
        left, right = _literal(node.left, constants), _literal(node.right, constants)
        if isinstance(left, int | float) and isinstance(right, int | float):
            return _compute(node.op, left, right)
        return None
    try:
        return ast.literal_eval(node) if node is not None else None
    except (ValueError, TypeError, MemoryError, RecursionError):
        return None


def _compute(operator: ast.operator, left: float, right: float) -> float | None:
    try:
        if isinstance(operator, ast.Mult):
            return left * right
        if isinstance(operator, ast.Div):
            return left / right
        if isinstance(operator, ast.Pow) and abs(right) < 64:
            return float(left**right) if right < 0 else left**right
    except (ArithmeticError, ValueError):
        pass
    return None


class ProgramFlags(Struct, frozen=True):
    """The flags of a command's program, if `{params}` in the command writes flags.

    `script`: the program's file as the command names it. There are no flags if no source can be
    read.
    """

    command: tuple[str, ...]
    script: str = ""
    flags: tuple[Flag, ...] = ()

    def known(self, names: Iterable[str]) -> frozenset[str]:
        """Those of `names` that are flags of the program, in any spelling."""
        own = {name: _own_flag(name, _is_kebab(self.command)) for name in names}
        return frozenset(name for name, flag in own.items() if _find_flag(name, flag, self.flags))

    def mistakes(self, new: Iterable[str], known: Iterable[str]) -> list[str]:
        """The mistakes in parameters of any name, which `{params}` writes.

        `new` are their names, `known` those of all parameters of the job. Unknown flags are none: a
        program may read them without declaring them.
        """
        is_kebab = _is_kebab(self.command)
        found = (
            _flag_mistake(self.script, name, self.flags, self.command, known, is_kebab)
            for name in new
        )
        return list(filter(None, found))


def read_flags(command: Sequence[str], folder: Path) -> ProgramFlags:
    """Read the flags of the program of a command; `folder` is that of the job's code."""
    words = tuple(command)
    script = next((word for word in words if word.endswith(".py")), "")
    writes_flags = re.search(r"\{params(?::kebab)?\}", " ".join(words))
    if not (script and writes_flags and (folder / script).is_file()):
        return ProgramFlags(words, script)
    try:
        return ProgramFlags(words, script, tuple(read_program(folder / script, folder).flags))
    except (UsageError, RecursionError):
        return ProgramFlags(words, script)


def _is_kebab(command: Sequence[str]) -> bool:
    return "{params:kebab}" in " ".join(command)


def _own_flag(name: str, is_kebab: bool) -> str:
    """The flag that `{params}` writes for a parameter."""
    return f"--{name.replace('_', '-') if is_kebab else name}"


def _find_flag(name: str, own: str, flags: Sequence[Flag]) -> Flag | None:
    """The flag that the parameter `name` means, which `{params}` writes as `own`."""
    named, like = {own, f"-{name}"}, own.replace("_", "-")
    return next((flag for flag in flags if named & {*flag.names, flag.off}), None) or next(
        (flag for flag in flags if like in {each.replace("_", "-") for each in flag.names}), None
    )


def _flag_mistake(
    script: str, name: str, flags: Sequence[Flag], command: Sequence[str], known: Iterable[str],
    is_kebab: bool,
) -> str:  # fmt: skip
    """The mistake in one parameter; "" without one."""
    own = _own_flag(name, is_kebab)
    flag = _find_flag(name, own, flags)
    if flag is None or flag.kind not in ("value", "switch"):
        return ""
    main, parameter = f"--{flag.name}", flag.name.replace("-", "_") if is_kebab else flag.name
    if flag.kind == "switch":
        written = own if own == flag.off else main
        both = f"{main}/{flag.off}" if flag.off else main
        if f"{{{both}}}" in command:
            return f"-p {name}=...: the parameter is {parameter}: -p {parameter}=false"
        return (
            f'-p {name}=...: {written} of {script} takes no value. Write "{{{both}}}" into the '
            f"command and {parameter} = false under [params] of job.toml; without a job.toml, "
            f"{written} after --."
        )
    others = {*flag.names} - {own}
    same = {
        each
        for each in known
        if each != name and others & {f"--{each}", f"--{each.replace('_', '-')}"}
    }
    if same:
        return f"-p {name}=...: {script} has it as {main}: the parameter is {same.pop()}."
    there = next((word for word in command if word.partition("=")[0] in others), "")
    if there:
        return f"-p {name}=...: {script} has it as {main}, and the command has {there} already."
    if own not in flag.names and is_kebab and "_" in flag.name:
        return f"-p {name}=...: {{params}} would write {own}. Write {main} into the command."
    if own not in flag.names:
        return f"-p {name}=...: {script} has no flag {own}: the parameter is {parameter}."
    return ""


# --- Modules --------------------------------------------------------------------------------------


def _local_modules(script: Path, tree: ast.Module, folder: Path) -> Iterator[ast.Module]:
    """Yield the program's tree, and those of the modules of the folder that it imports."""
    waiting, seen = [(tree, script)], {script.resolve()}
    while waiting and len(seen) <= _MAX_FILES:
        module, path = waiting.pop()
        yield module
        for file in _imported_files(module, (path.parent, script.parent, folder)):
            if file.resolve() not in seen:
                seen.add(file.resolve())
                parsed = _parse(file, is_program=False)
                if parsed is not None:
                    waiting.append((parsed, file))


def _imported_files(tree: ast.Module, roots: Sequence[Path]) -> Iterator[Path]:
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            names = [base, *(f"{base}.{alias.name}".strip(".") for alias in node.names)]
        for name in filter(None, names):
            below = name.replace(".", "/")
            for root in dict.fromkeys(roots):
                for file in (root / f"{below}.py", root / below / "__init__.py"):
                    if file.is_file():
                        yield file


def _is_local(name: str, root: Path) -> bool:
    return (root / f"{name}.py").is_file() or any((root / name).glob("*.py"))


def _imports(tree: ast.AST, in_try: bool = False) -> Iterator[tuple[str, bool]]:
    """Yield the top-level names of absolute imports, and whether each is in a `try`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name.partition(".")[0], in_try
        elif isinstance(node, ast.ImportFrom):
            if node.level == 0 and node.module:
                yield node.module.partition(".")[0], in_try
                if node.module == "torch.utils.tensorboard":  # it imports a package of its own
                    yield "tensorboard", in_try
        elif not (isinstance(node, ast.If) and _is_type_checking(node.test)):
            yield from _imports(node, in_try or isinstance(node, ast.Try))


def _is_type_checking(test: ast.expr) -> bool:
    name = test.attr if isinstance(test, ast.Attribute) else getattr(test, "id", "")
    return name == "TYPE_CHECKING"


def _find_ranks(tree: ast.Module) -> str:
    """The call that lets processes train together: of torch, accelerate or Lightning; else ""."""
    modules = {name for name, _ in _imports(tree)}
    for node in ast.walk(tree):
        name = getattr(getattr(node, "func", None), "attr", "")
        name = name or getattr(getattr(node, "func", None), "id", "")
        if not isinstance(node, ast.Call) or not name:
            continue
        is_trainer = (
            name == "Trainer"
            and {"lightning", "pytorch_lightning"} & modules
            and {"devices", "strategy", "num_nodes"} & _keywords(node).keys()
        )
        is_accelerator = name == "Accelerator" and "accelerate" in modules
        if name == "init_process_group" or is_accelerator or is_trainer:
            return f"{name}(), line {node.lineno}"
    return ""


# Calls that make a folder, of the standard library and of libraries that train.
_MAKE_FOLDERS = (
    "mkdir", "makedirs", "SummaryWriter", "Trainer", "TrainingArguments",
    "Seq2SeqTrainingArguments", "ModelCheckpoint", "TensorBoardLogger", "CSVLogger",
    "save_pretrained",
)  # fmt: skip


def _makes_folders(tree: ast.Module) -> bool:
    return any(
        isinstance(node, ast.Call) and any(_ends_with(node.func, name) for name in _MAKE_FOLDERS)
        for node in ast.walk(tree)
    )


# --- Variables ------------------------------------------------------------------------------------


def _variables(tree: ast.AST) -> Iterator[str]:
    """Yield the names in `os.environ["NAME"]`, `os.environ.get("NAME")` and `os.getenv("NAME")`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and _ends_with(node.value, "environ"):
            name = _literal(node.slice, {})
        elif isinstance(node, ast.Call) and node.args and _reads_variable(node.func):
            name = _literal(node.args[0], {})
        else:
            continue
        if isinstance(name, str):
            yield name


def _reads_variable(function: ast.expr) -> bool:
    if _ends_with(function, "getenv"):
        return True
    return (
        isinstance(function, ast.Attribute)
        and function.attr == "get"
        and _ends_with(function.value, "environ")
    )


def _ends_with(node: ast.expr, name: str) -> bool:
    return name in (getattr(node, "attr", ""), getattr(node, "id", ""))


# --- Flags ----------------------------------------------------------------------------------------


def _flags(tree: ast.Module, constants: Mapping[str, Any]) -> Iterator[Flag]:
    yield from _argparse_flags(tree, constants)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", "") or getattr(node.func, "id", "")
            if name in ("option", "argument") and _ends_with(node.func, name):
                yield from _click_flag(node, name, constants)
            elif name.startswith("DEFINE_"):
                yield from _absl_flag(node, name, constants)
        elif isinstance(node, ast.FunctionDef) and _is_typer_command(node, tree):
            yield from _typer_flags(node, constants)


def _keywords(call: ast.Call) -> dict[str, ast.expr]:
    return {each.arg: each.value for each in call.keywords if each.arg}


def _names(call: ast.Call) -> list[str]:
    found = (_literal(each, {}) for each in call.args)
    return [each for each in found if isinstance(each, str)]


def _scalar(value: Any) -> Scalar | None:
    return value if isinstance(value, str | int | float | bool) else None


def _long_name(names: Sequence[str]) -> str:
    """`batch-size` of `-b`, `--batch-size`, and of click's `--amp/--no-amp`."""
    long = [name for name in names if name.startswith("--")] or list(names)
    return long[0].partition("/")[0].lstrip("-") if long else ""


def _aliases(names: Sequence[str]) -> tuple[str, ...]:
    """`--lr`, `-l` of `--learning-rate`, `--lr`, `-l`."""
    own = f"--{_long_name(names)}"
    found = (name.partition("/")[0] for name in names if name.startswith("-"))
    return tuple(name for name in found if name != own)


def _off(names: Sequence[str]) -> str:
    """`--no-amp` of click's `--amp/--no-amp`."""
    return next((off for name in names if (off := name.partition("/")[2]).startswith("--")), "")


def _switch_default(default: Scalar | None, off: str) -> bool | None:
    """The default of a switch that a parameter can stand for: if it is on, a flag must end that."""
    if not isinstance(default, bool):
        return None
    return None if default and not off else default


def _argparse_flags(tree: ast.Module, constants: Mapping[str, Any]) -> Iterator[Flag]:
    """Yield the flags of argparse, two switches with one `dest` as one flag.

    Defaults of `set_defaults` come before those of the flags.
    """
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    common = {
        name: value
        for call in calls
        if getattr(call.func, "attr", "") == "set_defaults"
        for name, value in _keywords(call).items()
    }
    added = [call for call in calls if _ends_with(call.func, "add_argument") and _names(call)]
    kinds = ("store_true", "store_false")
    pairs: dict[str, dict[str, ast.Call]] = {}  # dest -> the action of each of its switches
    for call in added:
        action = _literal(_keywords(call).get("action"), {})
        if action in kinds:
            pairs.setdefault(_destination(call), {}).setdefault(action, call)
    offs = {id(on): off for pair in pairs.values() if (on := pair.get(kinds[0])) is not None
            if (off := pair.get(kinds[1])) is not None}  # fmt: skip
    for call in added:
        if not any(call is off for off in offs.values()):
            yield _argparse_flag(call, constants, common, offs.get(id(call)))


def _destination(call: ast.Call) -> str:
    """The attribute that a flag of argparse sets: `batch_size`."""
    dest = _literal(_keywords(call).get("dest"), {})
    return dest if isinstance(dest, str) else _long_name(_names(call)).replace("-", "_")


def _argparse_flag(
    call: ast.Call,
    constants: Mapping[str, Any],
    common: Mapping[str, ast.expr],
    off_call: ast.Call | None,
) -> Flag:
    """`common` are the defaults of `set_defaults`; `off_call` adds the flag that switches it off,
    and of two flags the first decides the default.
    """
    given, names = _keywords(call), _names(call)
    first = min(filter(None, (call, off_call)), key=lambda each: (each.lineno, each.col_offset))
    given |= {key: value for key, value in _keywords(first).items() if key == "default"}
    if _destination(call) in common:
        given["default"] = common[_destination(call)]
    name = _long_name(names)
    action = _literal(given.get("action"), {}) or getattr(given.get("action"), "attr", "")
    nargs = _literal(given.get("nargs"), constants)
    kind: FlagKind = "value"
    if action in _ACTIONS or action == "BooleanOptionalAction":
        kind = "switch"
    elif not names[0].startswith("-"):
        kind = "positional"
    elif action in ("append", "extend") or nargs not in (None, "?", 1):
        kind = "several"
    if kind == "value" and not any(each.startswith("--") for each in names):
        kind = "several"  # only a short name
    if kind == "value" and getattr(given.get("type"), "id", "") == "bool":
        kind = "several"  # bool("false") is True: a text cannot switch it off
    default = _scalar(_literal(given.get("default"), constants))
    required = bool(_literal(given.get("required"), {}))
    if kind == "positional":
        required = nargs not in ("?", "*") and default is None
    default, off = _as_type(default, given.get("type")), ""
    if kind == "switch":
        has_long = any(each.startswith("--") for each in names)
        off = f"--no-{name}" if action == "BooleanOptionalAction" else ""
        if off_call is not None:
            off = f"--{_long_name(_names(off_call))}"
            default = default if "default" in given else first is off_call
        elif action in ("store_true", "store_false"):
            default = False  # without its flag: `--no-cuda` with `store_false` is not given
        default = _switch_default(default, off) if has_long else None
    return Flag(name, kind, default, call.lineno, required, _aliases(names), off)


def _as_type(default: Scalar | None, type_: ast.expr | None) -> Scalar | None:
    """The default as the flag's type: argparse takes `default=1` of a float as it is."""
    if getattr(type_, "id", "") == "float" and type(default) is int:
        return float(default)
    return default


def _click_flag(call: ast.Call, name: str, constants: Mapping[str, Any]) -> Iterator[Flag]:
    given, names = _keywords(call), _names(call)
    if not names or (name == "option" and not names[0].startswith("-")):
        return
    kind: FlagKind = "value"
    if "/" in names[0] or _literal(given.get("is_flag"), {}) or "count" in given:
        kind = "switch"
    elif _literal(given.get("multiple"), {}) or _literal(given.get("nargs"), {}) not in (None, 1):
        kind = "several"
    elif name == "argument":
        kind = "positional"
    default = _scalar(_literal(given.get("default"), constants))
    if isinstance(default, bool):
        kind = "switch"
    required = bool(_literal(given.get("required"), {})) or (kind == "positional" and not default)
    off = _off(names)
    if kind == "switch":
        is_counted = (
            bool(_literal(given.get("count"), {})) or names[0].partition("/")[0][:2] != "--"
        )
        default = None if is_counted else _switch_default(bool(default), off)
    yield Flag(_long_name(names), kind, default, call.lineno, required, _aliases(names), off)


def _absl_flag(call: ast.Call, name: str, constants: Mapping[str, Any]) -> Iterator[Flag]:
    flag = _literal(call.args[0], {}) if call.args else None
    if not isinstance(flag, str):
        return
    kinds: dict[str, FlagKind] = {"DEFINE_list": "several", "DEFINE_multi_string": "several"}
    kind = kinds.get(name, "switch" if name in ("DEFINE_bool", "DEFINE_boolean") else "value")
    given = call.args[1] if len(call.args) > 1 else _keywords(call).get("default")
    default = _scalar(_literal(given, constants))
    off = f"--no{flag}" if kind == "switch" else ""
    default = _switch_default(default, off) if off else default
    yield Flag(flag, kind, default, call.lineno, off=off)


def _is_typer_command(function: ast.FunctionDef, tree: ast.Module) -> bool:
    for each in function.decorator_list:
        target = each.func if isinstance(each, ast.Call) else each
        if isinstance(target, ast.Attribute) and target.attr == "command":
            return _mentions(tree, "typer")
    return any(
        isinstance(node, ast.Call)
        and ast.unparse(node.func) == "typer.run"
        and [getattr(arg, "id", "") for arg in node.args] == [function.name]
        for node in ast.walk(tree)
    )


def _mentions(tree: ast.Module, module: str) -> bool:
    return any(name == module for name, _ in _imports(tree))


def _typer_flags(function: ast.FunctionDef, constants: Mapping[str, Any]) -> Iterator[Flag]:
    arguments = function.args
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(plain) - len(arguments.defaults))
    defaults += arguments.defaults
    pairs = [*zip(plain, defaults, strict=True)]
    pairs += [*zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    for argument, given in pairs:
        name, default, is_option = argument.arg.replace("_", "-"), given, given is not None
        names: list[str] = []
        if isinstance(given, ast.Call):
            default = given.args[0] if given.args else _keywords(given).get("default")
            names = [each for each in _names(given) if each.startswith("-")]
            name = _long_name(names) or name
            is_option = _ends_with(given.func, "Option")
        value, off = _scalar(_literal(default, constants)), ""
        kind: FlagKind = "value" if is_option else "positional"
        if isinstance(value, bool) or getattr(argument.annotation, "id", "") == "bool":
            kind, off = "switch", _off(names) if names else f"--no-{name}"
            value = _switch_default(value, off)
        is_required = given is None
        yield Flag(name, kind, value, argument.lineno, is_required, _aliases(names), off)
