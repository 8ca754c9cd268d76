from langchain_tests.integration_tests import EmbeddingsIntegrationTests

from langchain_ragaccel import RagaccelEmbeddings


class TestStandard(EmbeddingsIntegrationTests):
    @property
    def embeddings_class(self):
        return RagaccelEmbeddings
