"""Catalogs are written, read and merged without losing a row."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from sample_files import SAMPLES

from slimckpt import columns
from slimckpt.analysis.catalog_file import pack_catalog, unpack_catalog
from slimckpt.analysis.scan import scan
from slimckpt.analysis.tree import walk
from slimckpt.model import Catalog


def scanned(folder: str) -> Catalog:
    with ThreadPoolExecutor(1) as executor:
        return scan(walk(bytes(SAMPLES / folder)), executor)


def rows(catalog: Catalog) -> list[object]:
    table = catalog.table
    return [
        catalog.files,
        [table.tensor(row) for row in range(table.n_tensors)],
        [table.payload(row) for row in range(table.n_payloads)],
    ]


@pytest.mark.parametrize("folder", ["ms_dp8_ckpt", "ms_chunked", "lora_steps", "fsdp_dcp_4"])
def test_a_catalog_comes_back_as_it_was(folder: str) -> None:
    catalog = scanned(folder)
    again = unpack_catalog(pack_catalog(catalog))
    assert rows(again) == rows(catalog)
    assert np.array_equal(again.tensor_start, catalog.tensor_start)


def test_catalogs_scanned_apart_merge_to_one() -> None:
    parts = [unpack_catalog(pack_catalog(scanned(f))) for f in ("ms_dp8_ckpt", "ms_uneven4_ckpt")]
    merged = Catalog.merge(parts)
    assert merged.table.names() == parts[0].table.names() + parts[1].table.names()
    second = [merged.table_of(len(parts[0].files) + f) for f in range(len(parts[1].files))]
    alone = [parts[1].table_of(f) for f in range(len(parts[1].files))]
    for found, expected in zip(second, alone, strict=True):
        assert [found.tensor(r) for r in range(found.n_tensors)] == [
            expected.tensor(r) for r in range(expected.n_tensors)
        ]


def test_other_columns_are_not_a_catalog() -> None:
    with pytest.raises(ValueError, match="catalog"):
        unpack_catalog(columns.pack({}, {}))
