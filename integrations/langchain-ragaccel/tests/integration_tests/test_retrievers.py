import pytest
from hash_embedder import HashEmbedder
from langchain_tests.integration_tests import RetrieversIntegrationTests
from ragaccel import Store, index_folder

from langchain_ragaccel import RagaccelEmbeddings, RagaccelRetriever


class TestStandard(RetrieversIntegrationTests):
    @pytest.fixture(autouse=True)
    def index(self, tmp_path):
        folder = tmp_path / "docs"
        folder.mkdir()
        for name in ("lamp", "wick", "boat", "whale", "gannet"):
            (folder / f"{name}.md").write_text(f"# {name}\n\nOne of the keeper's {name}s.\n")
        self.place = tmp_path / "index.db"
        with Store(self.place) as store:
            index_folder(store, HashEmbedder(), folder)

    @property
    def retriever_constructor(self):
        return RagaccelRetriever

    @property
    def retriever_constructor_params(self):
        embeddings = RagaccelEmbeddings(embedder=HashEmbedder())
        return {"index": self.place, "embeddings": embeddings}

    @property
    def retriever_query_example(self):
        return "the keeper's boat"
