"""A name means one thing and is used; files, folders and the whole product stay small."""

from __future__ import annotations

from structure.counts import MAX_CLASSES, MAX_FILES, MAX_LINES, NONE, by_folder, class_names, file_names
from support.product import modules, unused_public_names


def test_the_product_has_few_lines() -> None:
    lines = sum(by_folder().values(), NONE).lines
    assert lines <= MAX_LINES, (
        f"{lines:,} lines, at most {MAX_LINES:,}: make others shorter, or say why the bound must rise"
    )


def test_the_product_has_few_classes() -> None:
    classes = sum(by_folder().values(), NONE).classes
    assert classes <= MAX_CLASSES, (
        f"{classes} classes, at most {MAX_CLASSES}: merge some, or say why the bound must rise"
    )


def test_no_folder_is_long() -> None:
    long = [f"{folder}: {row.files} files" for folder, row in by_folder().items() if row.files > MAX_FILES]
    assert not long, "\n".join(long)


def test_a_class_name_stands_for_one_class() -> None:
    twice = [f"{name}: {' '.join(where)}" for name, where in sorted(class_names().items()) if len(where) > 1]
    assert not twice, "\n".join(twice)


def test_a_file_name_is_used_at_most_twice() -> None:
    often = [f"{name}: {' '.join(where)}" for name, where in sorted(file_names().items()) if len(where) > 2]
    assert not often, "\n".join(often)


def test_every_public_name_is_imported_or_exported() -> None:
    """A name that only its own module uses begins with an underscore; one that nothing uses is deleted."""
    unused = [f"{modules()[module].where}: nothing imports {name}" for module, name in unused_public_names()]
    assert not unused, "\n".join(unused)
