"""One schema for files that were written apart: widened where Arrow can without loss, else refused. Knows no file."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

import pyarrow as pa

from batchgen.errors import InputError


def require_columns(schema: pa.Schema, named: Mapping[str, str]) -> None:
    """`named`: key of the job file -> column it names. Raises InputError for the first that the input lacks."""
    for key, name in named.items():
        if name not in schema.names:
            near = difflib.get_close_matches(name, schema.names, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise InputError(
                f"{key}: the input has no column {name}; {hint}It has {', '.join(schema.names) or 'no columns'}"
            )


def unify_schemas(schemas: Iterable[tuple[str, pa.Schema]]) -> pa.Schema:
    """One schema for all files (name, schema): the columns of the first, each of the narrowest type that holds all files'.

    Raises InputError that names both files and the column: one missing in a file, or of types that have no common one.
    """
    (first, base), *others = schemas
    _refuse_twins(first, base)
    fields: dict[str, pa.Field] = {field.name: field for field in base}
    for name, schema in others:
        if schema.equals(base):
            continue
        _refuse_twins(name, schema)
        for column in fields.keys() - set(schema.names):
            raise InputError(f"{name}: has no column {column}, but {first} has; make the files alike")
        for field in schema:
            if field.name not in fields:
                raise InputError(f"{name}: has a column {field.name} that {first} has not; make the files alike")
            one = fields[field.name]
            kind = widen(one.type, field.type)
            if kind is None:
                raise InputError(
                    f"{name}: column {field.name} is {field.type}, but {one.type} in {first}; give it one type in all files"
                )
            fields[field.name] = pa.field(field.name, kind, one.nullable or field.nullable, one.metadata)
    return pa.schema(list(fields.values()))


def widen(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """The narrowest type that holds both, by Arrow's rules; None if there is none. Text and bytes have none: a template
    that was written for one would be given the other."""
    if one == other or pa.types.is_null(other):
        return one
    if pa.types.is_null(one):
        return other
    if pa.types.is_dictionary(one) != pa.types.is_dictionary(other):
        return widen(_decoded(one), _decoded(other))
    if _is_text(one) != _is_text(other):
        return None
    if _is_text(one):
        return pa.large_string() if pa.large_string() in (one, other) else pa.string()
    try:
        schemas = [pa.schema([("", kind)]) for kind in (one, other)]
        return pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    except pa.ArrowException:
        return None


def may_not_fit(narrow: pa.DataType, wide: pa.DataType) -> bool:
    """Whether some value of `narrow` could be lost in `wide`, its widened type (such as int64 in double)."""
    types = pa.types
    if narrow == wide or types.is_null(narrow):
        return False
    if types.is_dictionary(narrow) and not types.is_dictionary(wide):
        return may_not_fit(narrow.value_type, wide)
    if types.is_integer(narrow) and types.is_integer(wide):
        grows = narrow.bit_width < wide.bit_width
        return not (grows if types.is_unsigned_integer(narrow) else types.is_signed_integer(wide))
    if types.is_integer(narrow) and types.is_float64(wide):
        return narrow.bit_width > 32
    return not ((types.is_floating(narrow) and types.is_floating(wide)) or (_is_text(narrow) and _is_text(wide)))


def conform(batch: pa.RecordBatch, wanted: pa.Schema, place: str) -> pa.RecordBatch:
    """The columns of `wanted` in its order and types. Raises InputError that names `place` if a value does not fit."""
    arrays = []
    for field in wanted:
        array = batch.column(field.name)
        if array.type != field.type:
            try:
                array = array.cast(field.type)
            except pa.ArrowException as error:
                raise InputError(
                    f"{place}: column {field.name} is {array.type}, but {field.type} with the other files, and not all of "
                    f"it fits: {(str(error).splitlines() or [''])[0]}; give it one type in all files"
                ) from None
        if pa.types.is_dictionary(field.type) and array.dictionary.null_count:  # which Parquet cannot hold
            array = array.dictionary_decode().dictionary_encode().cast(field.type)
        arrays.append(array)
    return to_batch(arrays, wanted, batch.num_rows)


def to_batch(arrays: list[pa.Array], schema: pa.Schema, num_rows: int) -> pa.RecordBatch:
    """A batch that knows its number of rows even without columns."""
    if not arrays:
        return pa.RecordBatch.from_struct_array(pa.array([{}] * num_rows, pa.struct([])))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _decoded(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def _refuse_twins(name: str, schema: pa.Schema) -> None:
    for column in schema.names:
        if schema.names.count(column) > 1:
            raise InputError(f"{name}: has two columns named {column}; rename one")
