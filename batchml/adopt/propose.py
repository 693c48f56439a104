"""Write a job.toml from what a program's source and one attempt of it say. Nothing is run here."""

import json
import re
from collections.abc import Container, Iterable, Iterator, Sequence
from pathlib import PurePosixPath

from msgspec import Struct

from batchml.adopt.observe import (
    DATA_FOLDERS,
    Observation,
    describe_files,
    keep_patterns,
    memory_to_request,
)
from batchml.adopt.packages import ImageChoice
from batchml.errors import UsageError
from batchml.jobs.source import Flag, ProgramSource
from batchml.model.job import Scalar

# Words in the names of flags whose value is a folder or a file, and the folder of the run for it.
_FOLDERS = (
    ("{checkpoints}", ("checkpoint", "checkpoints", "ckpt", "ckpts", "snapshot", "snapshots")),
    ("{data}", (*DATA_FOLDERS, "data-root", "root", "corpus", "train-data", "imagenet")),
    ("{outputs}", (
        "output", "outputs", "out", "results", "result", "log", "logs", "logdir", "work", "exp",
        "experiment", "tensorboard", "tb", "runs", "model", "artifacts", "save", "saves",
    )),
)  # fmt: skip
_PLACE_WORDS = frozenset(("dir", "directory", "folder", "path", "file", "root", "filename", "to"))
_IGNORED_VARIABLES = re.compile(
    r"BATCHML_|AWS_BATCH_|SLURM_|OMP|MASTER_|(?:LOCAL_|GROUP_)?(?:RANK|WORLD_SIZE)$|CUDA_VISIBLE"
    r"|(?:HOME|USER|PATH|PWD|TMPDIR|HOSTNAME|SHELL|LANG)$"
)
_RESUME_FLAGS = ("ckpt-path", "checkpoint-path", "from-checkpoint", "load-checkpoint", "load-ckpt")
_COLUMN = 44  # of the comments


class FoundArgument(Struct, frozen=True):
    """A flag's value for the command. `word` is a placeholder, or None for a parameter."""

    flag: Flag
    value: Scalar
    why: str
    word: str = ""


class Proposal(Struct, frozen=True):
    """The arguments of the proposed command: flags with a folder, parameters, other words."""

    placed: tuple[FoundArgument, ...] = ()
    params: tuple[FoundArgument, ...] = ()
    switches: tuple[FoundArgument, ...] = ()  # parameters that are flags without a value
    words: tuple[str, ...] = ()  # arguments as given: positional ones, unknown flags
    left_out: tuple[str, ...] = ()  # sentences about flags that are not in the command
    folders: tuple[str, ...] = ()  # parameters that name what the program writes
    unset: tuple[FoundArgument, ...] = ()  # without a default: `{params}` writes those of -p

    @property
    def is_kebab(self) -> bool:
        """Whether a parameter is written with `_` for the `-` of its flag."""
        names = [each.flag.name for each in self.params]
        if not any("_" in name or "-" in name for name in names):
            others = [each.flag.name for each in self.unset]
            names = [] if any("_" in name for name in others) else others
        return any("-" in name for name in names)

    @property
    def is_mixed(self) -> bool:
        """Whether the command names each parameter: `--batch-size` beside `--max_steps`."""
        return self.is_kebab and any("_" in each.flag.name for each in self.params)


def propose_arguments(
    source: ProgramSource,
    given: Sequence[str],
    sent: Container[str] = (),
    on_machine: Container[str] = (),
) -> Proposal:
    """Sort the flags of a program, and the arguments of the user, into those of a command.

    `sent` has the paths that travel with the code, `on_machine` absolute paths that exist here: a
    flag for data keeps such a value, and any flag the value that the user gave.
    """
    values, words = _read_arguments(source.flags, given)
    can_resume = any(is_resume_flag(flag) for flag in source.flags)
    placed, params, switches, left, folders, unset = [], [], [], [], [], []
    for flag in source.flags:
        default, where = flag.default, f"line {flag.line}"
        value = values.get(flag.name, default)
        if _is_parameter(flag) and flag.kind == "switch":
            where += f"; true writes --{flag.name}" + (f", false {flag.off}" if flag.off else "")
            switches.append(FoundArgument(flag, bool(value), where))
            continue
        if flag.kind != "value":
            is_given = not {*flag.names}.isdisjoint(word.partition("=")[0] for word in words)
            is_usual = flag.kind == "positional" or flag.name in ("help", "version", "h")
            if not (is_given or is_usual):
                what = "is no single value: to use it, write it into command, not -p"
                if flag.off:
                    what = (
                        f'has no default: to use it, write "{{--{flag.name}/{flag.off}}}" into '
                        f"command and {flag.name} = true or false under [params]"
                    )
                left.append(f"--{flag.name} ({where}) {what}")
            continue
        if source.ranks and _words(flag.name) == ["local", "rank"] and flag.name not in values:
            left.append(f"--{flag.name} ({where}) differs by rank: read LOCAL_RANK")
            continue
        if flag.name in values and default is not None:
            where += f"; its default is {json.dumps(default)}"
        place = find_place(flag.name, value)
        # The program has another source for it, such as a file of settings.
        if value in (None, "") and not flag.is_required:
            unset.append(FoundArgument(flag, "", where, place))
            continue
        if can_resume and "save" in flag.name:  # a later run finds there what it goes on from
            place = place.replace("{outputs}", "{checkpoints}")
        is_data = place.startswith("{data}")
        # What the program writes below its working folder is there again for `rerun --resume`.
        stays = place.startswith("{outputs}") and _can_stay(value, source.makes_folders)
        if place and not is_data and (stays or flag.name in values):
            folders.append(flag.name)
        place = "" if flag.name in values or stays else place
        if stays:
            where += "; in the working folder, whose new files are kept"
            if value in sent:
                where += f": {value} is sent, too, unless .batchmlignore names it"
        if is_data and value in on_machine:
            where += "; exists on this machine only: elsewhere {data}"
        if place and not (is_data and (value in sent or value in on_machine)):
            placed.append(FoundArgument(flag, value or "", where, place))
        elif value in (None, ""):
            unset.append(FoundArgument(flag, "", where))
        else:
            if flag.aliases:
                where += f"; also {', '.join(flag.aliases)}, but -p takes this name"
            params.append(FoundArgument(flag, value, where))
    return Proposal(
        tuple(placed), tuple(params), tuple(switches), tuple(words), tuple(left), tuple(folders),
        tuple(unset),
    )  # fmt: skip


def _can_stay(value: Scalar | None, makes_folders: bool) -> bool:
    """Whether a program can write to a path below its working folder, which begins without it."""
    if not isinstance(value, str) or not value or value.startswith(("/", "~")):
        return False
    path = PurePosixPath(value)
    is_file_here = bool(path.suffix) and len(path.parts) == 1 and not value.endswith("/")
    return ".." not in path.parts and (makes_folders or is_file_here or not path.parts)


def is_resume_flag(flag: Flag) -> bool:
    """Whether the value of a flag is a checkpoint to go on from: `--resume`, `--ckpt-path`."""
    if flag.kind != "value" or flag.default not in (None, ""):
        return False
    return _words(flag.name)[:1] == ["resume"] or "-".join(_words(flag.name)) in _RESUME_FLAGS


def _words(name: str) -> list[str]:
    return [each for each in re.split(r"[^a-z0-9]+", name.lower()) if each]


def missing_arguments(source: ProgramSource, given: Sequence[str]) -> list[str]:
    """The required flags and arguments that the user did not give."""
    values, words = _read_arguments(source.flags, given)
    positional = [flag for flag in source.flags if flag.kind == "positional" and flag.is_required]
    plain = [word for word in words if not word.startswith("-")]
    missing = [flag.name.upper() for flag in positional[len(plain) :]]
    return missing + [
        f"--{flag.name}"
        for flag in source.flags
        if flag.kind == "value" and flag.is_required and flag.name not in values
        and not find_place(flag.name, None)
    ]  # fmt: skip


def _read_arguments(
    flags: Iterable[Flag], given: Sequence[str]
) -> tuple[dict[str, Scalar], list[str]]:
    """The values that the user gave to flags that become parameters, and all other words."""
    by_name = {name: flag for flag in flags if _is_parameter(flag) for name in flag.names}
    by_off = {flag.off: flag for flag in by_name.values() if flag.off}
    values: dict[str, Scalar] = {}
    words: list[str] = []
    rest = list(given)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if name not in by_name and name[:2] in by_name and not name.startswith("--"):  # -b64
            name, equals, value = word[:2], "=", word[2:]
        flag = by_name.get(name)
        if word in by_off:
            values[by_off[word].name] = False
        elif flag is not None and flag.kind == "switch" and not equals:
            values[flag.name] = True
        elif flag is not None and flag.kind == "value" and (equals or rest):
            values[flag.name] = _typed(value if equals else rest.pop(0), flag.default)
        else:
            words.append(word)
    return values, words


def _is_parameter(flag: Flag) -> bool:
    return flag.kind == "value" or (flag.kind == "switch" and flag.default is not None)


def _typed(text: str, default: Scalar | None) -> Scalar:
    """The text as a number, if the default is a number or there is none."""
    if isinstance(default, str):
        return text
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def find_place(name: str, value: Scalar | None) -> str:
    """The placeholder for a flag that names a folder or a file: `{outputs}/model.pt`; "" for none.

    A flag is such a flag by its name and its value: `--save-dir`, `--out results/`,
    `--checkpoint model.pt`, but not `--model resnet18` and not `--save 1`.
    """
    if value is not None and not isinstance(value, str):
        return ""
    words = _words(name)
    whole = "-".join(words)
    is_place = bool(_PLACE_WORDS & set(words)) or whole.endswith(("dir", "path"))
    path = PurePosixPath(value or "")
    looks_like_path = value is not None and (
        "/" in value or bool(path.suffix) or value in (".", "..")
    )
    if not is_place and {"model", "dataset", "tokenizer"} & set(words):
        # `org/name` is a name on Hugging Face.
        looks_like_path = (value or "").startswith((".", "/", "~")) or (value or "").endswith("/")
    if "://" in (value or "") or words[:1] == ["resume"] or "pretrained" in words:
        return ""
    if value is None and not {"save", "dir", "output", "out", "data"} & set(words):
        is_place = False  # `--ckpt-path` without a default: a checkpoint to start from
    for placeholder, names in _FOLDERS:
        hit = any(word in names or word.removesuffix("dir") in names for word in words)
        is_alone = whole in names and (value is None or value == whole or looks_like_path)
        if (hit or whole in names) and (is_place or looks_like_path or is_alone):
            is_file = bool(path.suffix) and not (value or "").endswith("/")
            return f"{placeholder}/{path.name}" if is_file else placeholder
    return ""


# --- The file -------------------------------------------------------------------------------------


def write_job(
    script: str,
    given: Sequence[str],
    source: ProgramSource,
    image: ImageChoice,
    seen: Observation | None,
    sent: Container[str] = (),
    on_machine: Container[str] = (),
) -> str:
    """The text of the job.toml. `seen` is the attempt; None before it, or without one.

    `sent` has the paths that travel with the code, `on_machine` absolute paths that exist here.
    """
    found = propose_arguments(source, given, sent, on_machine)
    lines = [
        f"# Proposed by `batchml adopt {script}`. The comments say where each value comes from.",
        _line(f"image = {_quote(image.image)}", image.why),
        *_command_lines(script, found),
        *_resume_lines(found, seen),
    ]
    kept = keep_patterns(seen.files) if seen is not None else ()
    if seen is not None and kept:
        patterns = ", ".join(map(_quote, kept))
        wrote = f"it wrote {describe_files(seen.files)}"
        if seen.is_whole and not found.folders:
            lines.append(_line(f"keep = [{patterns}]", wrote))
        else:  # it may write others later, or with other parameters
            lines.append(_line(f"#keep = [{patterns}]", f"all new files; so far {wrote}"))
    if found.params or found.switches:
        lines += ["", _line("[params]", f"flags of {script}: -p NAME=VALUE changes one")]
        lines += [
            _line(f"{_param_name(each.flag.name, found)} = {_to_toml(each.value)}", each.why)
            for each in (*found.params, *found.switches)
        ]
    if source.ranks:
        lines += ["", "[launch]", _line('kind = "torchrun"', f"it calls {source.ranks}")]
        lines += ['#processes_per_node = "auto"', "# on several nodes: batchml submit --nodes 2"]
    lines += ["", *_resource_lines(seen)]
    if seen is not None and seen.metrics:
        lines += ["", "[metrics]"]
        for metric in seen.metrics:
            best = f', best = "{metric.best}"' if metric.best else ""
            lines.append(f"# it printed: {_comment(metric.line)}")
            lines.append(f"{metric.name} = {{ pattern = {_quote(metric.pattern)}{best} }}")
    variables = [name for name in source.variables if not _IGNORED_VARIABLES.match(name)]
    if variables:
        them = "it in [env], a secret" if len(variables) == 1 else "them in [env], secrets"
        lines += ["", f"# It reads {', '.join(variables)}: set {them} in [secrets]."]
    return "\n".join(lines) + "\n"


def _command_lines(script: str, found: Proposal) -> Iterator[str]:
    left_out = [*map(_describe_unset, found.unset, [found] * len(found.unset)), *found.left_out]
    if left_out:
        yield "# Not in the command: " + "; ".join(left_out) + "."
    words = ["python", script, *found.words]
    for each in found.placed:
        words += [f"--{each.flag.name}", each.word]
    for each in found.switches:
        words.append(f"{{--{each.flag.name}{f'/{each.flag.off}' * bool(each.flag.off)}}}")
    if found.is_mixed:
        for each in found.params:
            words += [f"--{each.flag.name}", f"{{{_param_name(each.flag.name, found)}}}"]
    if found.unset or (found.params and not found.is_mixed):
        words.append("{params}")
    yield f"command = [{', '.join(map(_quote, words))}]"
    for each in found.placed:
        was = f"; without: {json.dumps(each.value)}" if each.value else ""
        if each.word.startswith("{outputs}"):
            was += "; rerun --resume brings back {checkpoints}, not {outputs}"
        yield f"# --{each.flag.name}: a folder of the run ({each.why}{was})"
    if found.is_kebab and not found.is_mixed:
        yield _line('flags = "kebab"', "{params} writes --batch-size for batch_size")


def _describe_unset(each: FoundArgument, found: Proposal) -> str:
    """`--data (line 3) has no default: -p 'data={data}'`"""
    name = _typed_name(each.flag, found)
    setting = f"{name}={each.word or '...'}"
    how = f"-p {_shell_word(setting)}" if name else "to use it, write it into command"
    return f"--{each.flag.name} ({each.why}) has no default: {how}"


def _typed_name(flag: Flag, found: Proposal) -> str:
    """The name in -p of a flag that `{params}` writes; "" if `{params}` cannot write it."""
    if not found.is_kebab or found.is_mixed:
        return flag.name
    return "" if "_" in flag.name else flag.name.replace("-", "_")


def _shell_word(text: str) -> str:
    return text if re.fullmatch(r"[\w.,=/:+-]+", text) else f"'{text}'"


_CHECKPOINT = re.compile(r"last|latest|checkpoint[^/]*$|ckpt")
_MODEL_FILE = re.compile(r"\.(?:pt|pth|ckpt|bin|tar|safetensors|pkl|npz|h5|keras|joblib)$")


def _resume_lines(found: Proposal, seen: Observation | None) -> Iterator[str]:
    """A comment: how a later run goes on from what an earlier one has saved."""
    names = [_typed_name(each.flag, found) for each in found.unset if is_resume_flag(each.flag)]
    resumes = next(filter(None, names), "")
    if not resumes:
        return
    place, files = "{checkpoints}/", [name for name, _ in seen.files] if seen else []
    saved = [name for name, _ in seen.placed if name.startswith(place)] if seen else []
    kept = sorted(filter(_MODEL_FILE.search, files))
    named = [name for name in (*saved, *files) if _CHECKPOINT.search(name.removeprefix(place))]
    has_place = any(each.word.startswith(place[:-1]) for each in found.placed)
    nothing = "{checkpoints}/FILE" if has_place else "FILE"
    name = next((each for each in (*named, *saved, *kept) if "'" not in each), nothing)
    which = "; this file is the attempt's" if name in files else ""
    yield f"# To go on from what a run has saved{which}:"
    yield _comment(f"#   batchml rerun --resume RUN -p {_shell_word(f'{resumes}={name}')}")


def _param_name(name: str, found: Proposal) -> str:
    name = name.replace("-", "_") if found.is_kebab else name
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _quote(name)


def _resource_lines(seen: Observation | None) -> Iterator[str]:
    yield "[resources]"
    if seen is not None and seen.memory_mib:
        why = f"it used {seen.memory_mib:.0f} MiB on this machine"
        yield _line(f'memory = "{memory_to_request(seen.memory_mib)}"', why)
    else:
        yield '#memory = "2 GiB"'
    yield "#vcpus = 1"
    yield _line('#gpus = "auto"', "one where the hosts of the queue have GPUs")


def _line(text: str, comment: str) -> str:
    return f"{text.ljust(_COLUMN)} # {_comment(comment)}"


def _comment(text: str) -> str:
    printable = "".join(each if each.isprintable() else " " for each in text)
    return printable[:120]


def _quote(text: str) -> str:
    """A TOML string: a literal one where that reads better."""
    if "\\" in text and "'" not in text and text.isprintable():
        return f"'{text}'"
    return '"' + "".join(map(_escape, text)) + '"'


def _escape(char: str) -> str:
    if char in '"\\':
        return f"\\{char}"
    if char.isprintable():
        return char
    return "?" if "\ud800" <= char <= "\udfff" else f"\\U{ord(char):08x}"


def _to_toml(value: Scalar) -> str:
    if isinstance(value, str):
        return _quote(value)
    return json.dumps(value) if isinstance(value, bool) else repr(value)


def check_script(
    script: str, given: Sequence[str], own_flags: Iterable[str], source: ProgramSource
) -> None:
    """Raise UsageError for flags of `adopt` after the script, which does not have them."""
    known = {flag.name for flag in source.flags}
    for word in given:
        name = word.partition("=")[0]
        if name in own_flags and name.lstrip("-") not in known:
            raise UsageError(
                f"{name} stands after {script}, so the program would get it, which has no such "
                f"flag. Write: batchml adopt {name} ... {script}"
            )
