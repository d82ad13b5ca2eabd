"""Pages of the reference that follow from the code: the API by module, and the command line."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

from scripts.docs.markdown import MADE, table

import posenc
from posenc.lab.cli.app import COMMANDS, app, arguments_of
from posenc.lab.cli.console import help_of

MODULES = (
    "posenc",
    "posenc.layout",
    "posenc.encoding",
    "posenc.attention",
    "posenc.attention.extra",
    "posenc.extension",
    "posenc.models",
    "posenc.distributed",
    "posenc.testing",
    "posenc.transformers",
    "posenc.transformers.acceleration",
    "posenc.transformers.caches",
    "posenc.transformers.stretching",
    "posenc.transformers.engines",
    "posenc.transformers.served",
    "posenc.lab.training",
    "posenc.lab.experiments.tasks",
    "posenc.lab.evaluation.questions",
    "posenc.lab.visualization.gallery",
)
"""Public modules that export names; a name is described in the first that has it."""

WHOLE = {
    "posenc.errors": (
        *("PosencError", "ArgumentError", "LengthError", "UnknownNameError", "BackendRefusal"),
        *("DerivativeError", "RankError", "DataError", "CheckpointError"),
        *("Interrupted", "OutputError"),
    ),
    "posenc.encoding.entry": ("Entry", "Claims", "Citation"),
    "posenc.registration": ("Registry",),
    "posenc.lab.experiments.compare": ("compare",),
    "posenc.lab.experiments.report": ("write_report",),
    "posenc.lab.experiments.settings": ("ComparisonSettings",),
    "posenc.lab.experiments.summary": ("summarise",),
    "posenc.lab.bench.run": ("BenchSettings", "bench"),
}
"""Names of modules that export none by a list."""


def pages() -> dict[str, str]:
    """Every page."""
    modules = {module: exported(module) for module in (*MODULES, *WHOLE)}
    return {
        "reference/api/index.md": index(modules),
        **{f"reference/api/{module}.md": api(module, names) for module, names in modules.items()},
        "reference/commands.md": commands(),
    }


def exported(module: str) -> list[str]:
    """Public names of a module."""
    return list(WHOLE.get(module) or importlib.import_module(module).__all__)


def index(modules: dict[str, list[str]]) -> str:
    """The page of all modules."""
    rows = (
        (f"[`{module}`]({module}.md)", first_line(importlib.import_module(module)))
        for module in modules
    )
    return f"""{MADE}

# API

{table(("module", ""), rows)}

```{{toctree}}
:hidden:

{chr(10).join(modules)}
```
"""


def first_line(documented: object) -> str:
    """The first sentence of a docstring."""
    return (
        (inspect.getdoc(documented) or "")
        .partition("\n\n")[0]
        .replace("\n", " ")
        .replace("``", "`")
    )


def home(name: str, value: object) -> str:
    """The first module that exports the object."""
    for module in (*MODULES, *WHOLE):
        if name in exported(module) and getattr(importlib.import_module(module), name) is value:
            return module
    raise LookupError(name)


def api(module: str, names: list[str]) -> str:
    """The page of a module."""
    imported = importlib.import_module(module)
    own, elsewhere = [], []
    for name in names:
        value = getattr(imported, name)
        place = home(name, value)
        if place == module:
            own.append(described(module, name, value))
        else:
            elsewhere.append(f"- `{name}`: see [`{place}`]({place}.md)")
    rst = "\n".join(own)
    more = ["Also here:\n\n" + "\n".join(elsewhere)] if elsewhere else []
    text = (inspect.getdoc(imported) or "").replace("``", "`").replace("::\n", ":\n")
    blocks = [MADE, f"# {module}", text, *more, f"```{{eval-rst}}\n{rst}\n```"]
    return "\n\n".join(blocks) + "\n"


def described(module: str, name: str, value: object) -> str:
    """The directive of autodoc for a name."""
    if inspect.isclass(value):
        return f".. autoclass:: {module}.{name}\n"
    if inspect.isroutine(value):
        return f".. autofunction:: {module}.{name}\n"
    return f".. py:data:: {module}.{name}\n\n   {constant(name, value)}\n"


@cache
def constants() -> dict[tuple[str, str], str]:
    """Docstrings of constants, which stand below them, by module and name."""
    found = {}
    root = Path(posenc.__file__).parent
    for file in root.rglob("*.py"):
        module = ".".join(file.relative_to(root.parent).with_suffix("").parts)
        for assigned, text in pairwise(ast.parse(file.read_text()).body):
            target = getattr(assigned, "target", None) or getattr(assigned, "targets", [None])[0]
            words = text.value if isinstance(text, ast.Expr) else None
            if isinstance(target, ast.Name) and isinstance(words, ast.Constant):
                found[module.removesuffix(".__init__"), target.id] = " ".join(
                    str(words.value).split()
                )
    return found


def constant(name: str, value: object) -> str:
    """The docstring of a constant, from the module that defines it; a type without is shown."""
    texts = (
        text
        for (module, known), text in constants().items()
        if known == name and getattr(sys.modules.get(module), name, None) is value
    )
    return next(texts, f"``{value}``".replace("typing.", ""))


def commands() -> str:
    """The page of the command line."""
    own = ((f"`{name}`", app[name].help) for name in app if name in ("--version", "--debug"))
    blocks = [
        MADE,
        "# Command line",
        f"{app.help} `posenc COMMAND --help` shows the same as here.",
        table(("option", "meaning"), own),
    ]
    for name, command in COMMANDS.items():
        blocks += [f"## posenc {name}", *words(help_of(command)), parameters(name)]
    return "\n\n".join(blocks) + "\n"


def words(text: str) -> Iterator[str]:
    """The help of a command, its examples as blocks of code."""
    lines: list[str] = []
    for part in inspect.cleandoc(text).split("\n\n"):
        if part.startswith("  "):
            lines.append(textwrap.dedent(part))
            continue
        if lines:
            yield "```console\n" + "\n".join(lines) + "\n```"
            lines = []
        yield marked(part).replace("*", "\\*")
    if lines:
        yield "```console\n" + "\n".join(lines) + "\n```"


def marked(text: str) -> str:
    """A sentence of a help text, with options as code."""
    return re.sub(r"(?<![\w`-])--[a-z][\w-]*", r"`\g<0>`", text.replace("<", "\\<"))


def parameters(name: str) -> str:
    """The table of a command's arguments and options."""
    rows = []
    for argument in arguments_of(name):
        if not argument.children:
            names = ", ".join(f"`{name}`" for name in argument.names)
            default = argument.show_default
            if callable(default):
                default = default(argument.field_info.default)
            value = f"`{default}`" if default else ""
            rows.append((names, value, marked(argument.parameter.help or "")))
    heads = ("option", "default", "meaning")
    if not any(value for _, value, _ in rows):
        return table(heads[::2], (row[::2] for row in rows))
    return table(heads, rows)
