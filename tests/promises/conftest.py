"""A document to exclude, in the run that the promises are tried on."""

import pytest

from surefoot.data.loader import Loader


@pytest.fixture
def late_document(loader: Loader) -> str:
    """A document that batch 17 reads first and no batch before 14 does."""
    for source, _, row in loader.sample_ids(17).tolist():
        for span in loader.row_documents(source, row):
            if loader.spans_read_before(span.document, 14) == 0:
                return span.document
    raise AssertionError("no document of batch 17 is new there; make the corpus larger")
