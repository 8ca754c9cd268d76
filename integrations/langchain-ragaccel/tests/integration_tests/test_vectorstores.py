import pytest
from langchain_tests.integration_tests import VectorStoreIntegrationTests

from langchain_ragaccel import RagaccelVectorStore


class TestStandard(VectorStoreIntegrationTests):
    @pytest.fixture
    def vectorstore(self):
        with RagaccelVectorStore(self.get_embeddings()) as store:
            yield store


class TestStandardOfAFile(VectorStoreIntegrationTests):
    @pytest.fixture
    def vectorstore(self, tmp_path):
        with RagaccelVectorStore(self.get_embeddings(), path=tmp_path / "store.db") as store:
            yield store
