"""`with_config`: options of a command from the dataclasses of `mmcompile.config`, and the same from a file.

A parameter annotated with one of these dataclasses becomes an option for each field: its name, type and choices, default and
help are the field's. `Annotated[PlanRequest, ("cluster", "stages")]` takes these fields only. Such a command also has
`--config FILE`, whose sections are the dataclasses and whose keys are their fields, and `--dump-config`, which prints that file.
A typed option overrides the file, and the file the defaults.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import Field, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from mmcompile import config
from mmcompile.cli.config_file import SECTIONS, dump_config, read_config
from mmcompile.cli.texts import SEARCH, parse_components, parse_counts, parse_degrees
from mmcompile.errors import ConfigError

_ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config", metavar="FILE", help="YAML or TOML file of options; typed ones override it.", show_default=False
    ),
]
_DumpOption = Annotated[
    bool, typer.Option("--dump-config", help="Print all options as such a file, and do nothing else.")
]
_NUMBERS: Mapping[str, type[Any]] = {"int": int, "float": float}
_PARSERS: Mapping[str, Callable[[str, list[str]], Any]] = {
    "Degrees": parse_degrees,
    "Counts": parse_counts,
    "Components": parse_components,
    "Sequence[str]": lambda option, texts: tuple(texts),
}
"""Type of a configuration field, as written in `mmcompile.config` -> parser of its option: (option, texts typed) -> value."""


def with_config(function: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for each field of its configuration parameters, `--config` and `--dump-config`."""
    parameters = inspect.signature(function, eval_str=True).parameters.values()
    topics = {own.name: found for own in parameters if (found := Topic.of(own.annotation)) is not None}
    offered = {name for topic in topics.values() for name in topic.names}

    @functools.wraps(function)
    def command(
        context: typer.Context, config_file: Path | None = None, show_config: bool = False, **given: Any
    ) -> None:
        typed = typed_options(context).keys()
        made: dict[str, Any] = {}
        for parameter, topic in topics.items():
            own = {name: given.pop(name) for name in topic.names}
            stored = {} if config_file is None else read_config(config_file, topic.section, topic.names)
            batch = given.get("global_batch") or own.get("global_batch") or stored.get("global_batch")
            values = {name: topic.value(name, own[name], offered, batch) for name in topic.names if name in typed}
            made[parameter] = topic.make(stored | values)
        if show_config:
            return dump_config({topics[parameter].section: value for parameter, value in made.items()})
        if "context" in inspect.signature(function).parameters:
            given["context"] = context
        function(**given, **made)

    expanded = [one for own in parameters for one in (topics[own.name].parameters() if own.name in topics else [own])]
    others = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in expanded if one.name != "context"]
    extra = {"context": typer.Context, "config_file": _ConfigOption, "show_config": _DumpOption}
    defaults = {"context": inspect.Parameter.empty, "config_file": None, "show_config": False}
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=annotation)
        for name, annotation in extra.items()
    ]
    command.__signature__ = inspect.Signature([*others, *added])  # pyright: ignore[reportAttributeAccessIssue]
    command.__annotations__ = {}
    return command


def typed_options(context: typer.Context) -> dict[str, str]:
    """Return the parameters given on the command line: name -> option as typed, or an argument's name in the help (`MODEL`)."""
    found: dict[str, str] = {}
    for own in context.command.params:
        source = context.get_parameter_source(own.name)
        # By name, for typer brings a click of its own.
        if source is not None and source.name != "DEFAULT":
            found[own.name] = own.opts[0] if own.opts[0].startswith("-") else str(own.metavar)
    return found


def refuse_typed(context: typer.Context, names: Collection[str], reason: str) -> None:
    """Raise ConfigError, which gives `reason`, if a parameter in `names` was given on the command line."""
    for name, option in typed_options(context).items():
        if name in names:
            raise ConfigError(f"{option} has no effect {reason}; drop one of the two")


@dataclass(frozen=True, kw_only=True, slots=True)
class Topic:
    """A dataclass of `mmcompile.config`, with those of its fields that are options of one command."""

    section: str
    kind: type[Any]
    names: tuple[str, ...]
    """Fields that are options of the command."""

    @classmethod
    def of(cls, annotation: Any) -> Topic | None:
        """Return the topic that a parameter is annotated with; None for an ordinary parameter."""
        kind, names = annotation, None
        if get_origin(annotation) is Annotated:
            kind, names = get_args(annotation)[:2]
        section = next((name for name, own in SECTIONS.items() if own is kind), None)
        if section is None:
            return None
        return cls(section=section, kind=kind, names=names or tuple(own.name for own in fields(kind)))

    def parameters(self) -> list[inspect.Parameter]:
        """Return a function parameter for each field, annotated as typer requires."""
        docs = field_docs()[self.kind.__name__]
        searches = "global_batch" in self.names
        return [_parameter(own, docs[own.name], searches) for own in fields(self.kind) if own.name in self.names]

    def value(self, name: str, typed: Any, offered: set[str], global_batch: int | None) -> Any:
        """Return a field's value, parsed from its text `typed`; None if that is `search`. Raises ConfigError for a wrong text.

        Args:
            offered: names of the fields that are options of the command.
            global_batch: value of `--global-batch`; some fields can be searched only if it is given.
        """
        own = next(own for own in fields(self.kind) if own.name == name)
        search = own.metadata.get("search")
        if search and typed in (SEARCH, [SEARCH]):
            if search == "with global_batch" and global_batch is None:
                raise ConfigError(
                    f"{flag(own)} search has no effect without --global-batch: say how many samples a step has"
                    if "global_batch" in offered
                    else f"{flag(own)} search is for `mmcompile plan`, which knows the cluster; say which, or train by a --plan"
                )
            return None
        parse = _PARSERS.get(_written(own))
        return typed if parse is None else parse(flag(own), typed)

    def make(self, values: Mapping[str, Any]) -> Any:
        """Return the dataclass with these values of fields. Raises ConfigError, with names of options as they are typed."""
        try:
            return self.kind(**values)
        except ConfigError as error:
            flags = {own.name: flag(own) for own in fields(self.kind)}
            text = re.sub(r"`(\w+)`", lambda match: flags.get(match[1], match[0]), str(error))
            raise ConfigError(text) from error


def _parameter(own: Field[Any], doc: str, searches: bool) -> inspect.Parameter:
    """Return the command-line option of a configuration field, as a parameter that typer reads.

    Args:
        doc: docstring of the field, whose first paragraph is the help.
        searches: True if the command has the option `--global-batch`; else the help shows no defaults that depend on it.
    """
    shown = own.metadata.get("shown")
    if shown and not searches:
        shown = re.sub("; [^;]*--global-batch.*", "", shown)
    written, metadata = _written(own), own.metadata
    kind = str if written == "str" else bool if written == "bool" else _NUMBERS.get(written)
    if written in _PARSERS:
        kind = list[str]
    choices = metadata.get("choices") or config.choices_of(getattr(config, written, None))
    if choices:
        texts = (*choices, SEARCH) if metadata.get("search") else choices
        kind = Literal[texts]  # pyright: ignore[reportInvalidTypeForm]  # made at run time, for typer
    default = None if written in _PARSERS else own.default
    info = typer.Option(
        flag(own),
        # Rich would take a word in brackets for markup.
        help=re.sub(r"\[(?=[a-z#/@])", r"\\[", doc.partition("\n\n")[0].replace("\n", " ")),
        metavar=metadata.get("metavar"),
        min=metadata.get("least") if written in _NUMBERS else None,
        show_default=shown or default is not None,
    )
    annotation = Annotated[kind | None if default is None else kind, info]  # type: ignore[operator, valid-type]
    return inspect.Parameter(own.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def flag(own: Field[Any]) -> str:
    """Return the option of a field, as it is typed: `--batch-size` for `batch_size`."""
    return f"--{(own.metadata.get('name') or own.name).replace('_', '-')}"


def _written(own: Field[Any]) -> str:
    return str(own.type).removesuffix(" | None")


@functools.cache
def field_docs() -> Mapping[str, Mapping[str, str]]:
    """Return dataclass -> field -> docstring, of `mmcompile.config`."""
    found: dict[str, dict[str, str]] = {}
    for node in ast.parse(Path(config.__file__).read_text()).body:
        body = node.body if isinstance(node, ast.ClassDef) else []
        for own, after in zip(body, body[1:], strict=False):
            if isinstance(node, ast.ClassDef) and isinstance(own, ast.AnnAssign) and isinstance(after, ast.Expr):
                text = inspect.cleandoc(ast.literal_eval(after.value))
                found.setdefault(node.name, {})[ast.unparse(own.target)] = text
    return found
