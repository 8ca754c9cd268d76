"""Chains: retrieval, prompt and model put together bare, in LangChain and in LlamaIndex, alike.

All write the same text around what their retriever finds, so that what differs between them is
what is measured. Nothing of a framework is imported before a chain of it is made.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ragaccel import RAG
from ragaccel.frameworks.prompt_parsing import is_documents_only

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ragaccel import LLM, Passage
    from ragaccel.config import Settings
    from ragaccel.models.tokenizer import Tokenizer
    from ragaccel.prompt import Message, Template
    from ragaccel.rag import PassageSource

TEMPLATE = "Answer from the context.\n\n{context}\n\nQuestion: {question}"
PACKAGES = {"langchain": "langchain_ragaccel", "llama_index": "llama_index.llms.ragaccel"}
"""What is imported for the chains of a framework."""


def is_installed(framework: str) -> bool:
    """Whether a framework is here, and the package that brings us into it."""
    try:
        importlib.import_module(PACKAGES[framework])
    except ImportError:
        return False
    return True


def written(question: str, passages: Sequence[Passage]) -> str:
    """The text that every chain gives its model."""
    return TEMPLATE.format(context=joined(passages), question=question)


def joined(passages: Sequence[Passage]) -> str:
    return "\n\n".join(passage.text for passage in passages)


def template_of(tokenizer: Tokenizer) -> Template | None:
    """Make the template that has ``RAG`` write the frameworks' text.

    None for a model that reads passages apart from the question: it is given them that way, as it
    is in the frameworks.
    """

    def write(
        question: str, passages: Sequence[Passage], _history: Sequence[Message]
    ) -> str | list[Message]:
        text = written(question, passages)
        return [{"role": "user", "content": text}] if tokenizer.has_chat_template else text

    return None if is_documents_only(tokenizer) else write


def langchain_chain(llm: LLM, retriever: Any, max_new_tokens: int, **options: Any) -> Any:
    """Make a chain from a question to text: a retriever of LangChain, a prompt, our model.

    ``options`` are those of the model class.
    """
    from langchain_core.output_parsers import StrOutputParser
    from langchain_core.prompts import PromptTemplate
    from langchain_core.runnables import RunnablePassthrough
    from langchain_ragaccel import ChatRagaccel, RagaccelLLM

    def show(documents: Sequence[Any]) -> str:
        return "\n\n".join(document.page_content for document in documents)

    kind = ChatRagaccel if llm.tokenizer.has_chat_template else RagaccelLLM
    model = kind(llm=llm, max_tokens=max_new_tokens, **options)
    sources: Any = {"context": retriever | show, "question": RunnablePassthrough()}
    return sources | PromptTemplate.from_template(TEMPLATE) | model | StrOutputParser()


def llama_index_engine(
    llm: LLM,
    retriever: Any,
    max_new_tokens: int,
    *,
    streaming: bool = False,
    settings: Settings | None = None,
) -> Any:
    """Make a query engine of a retriever of LlamaIndex, a prompt and our LLM.

    ``settings`` are those of every call.
    """
    from llama_index.core import PromptTemplate
    from llama_index.core.query_engine import RetrieverQueryEngine
    from llama_index.core.response_synthesizers import get_response_synthesizer
    from llama_index.llms.ragaccel import Ragaccel

    model = Ragaccel(llm=llm, max_new_tokens=max_new_tokens, generate_kwargs=dict(settings or {}))
    template = PromptTemplate(
        TEMPLATE.replace("context}", "context_str}").replace("question}", "query_str}")
    )
    synthesizer = get_response_synthesizer(
        llm=model, text_qa_template=template, streaming=streaming
    )
    return RetrieverQueryEngine(retriever, synthesizer)


def langchain_pieces(
    llm: LLM, source: PassageSource, k: int, max_new_tokens: int
) -> Callable[[str], Any]:
    """Make what streams a LangChain chain's answer over an index of ours, or what searches one."""
    from langchain_ragaccel import RagaccelRetriever

    return langchain_chain(llm, RagaccelRetriever(index=source, k=k), max_new_tokens).stream


def llama_index_pieces(
    llm: LLM, source: PassageSource, k: int, max_new_tokens: int
) -> Callable[[str], Any]:
    """Make what streams a query engine's answer over an index of ours, or what searches one."""
    from llama_index.retrievers.ragaccel import RagaccelRetriever

    engine = llama_index_engine(
        llm, RagaccelRetriever(source, similarity_top_k=k), max_new_tokens, streaming=True
    )
    return lambda question: engine.query(question).response_gen


def bare_pieces(
    llm: LLM, source: PassageSource, k: int, max_new_tokens: int
) -> Callable[[str], Any]:
    """Make what streams a ``RAG``'s answer, as it comes and whatever it is, as a chain's is."""
    template = template_of(llm.tokenizer)
    return RAG(
        llm,
        source,
        k=k,
        template=template,
        max_new_tokens=max_new_tokens,
        check_quotes=False,
    ).stream


STREAMING = {
    "bare": bare_pieces,
    "langchain": langchain_pieces,
    "llama_index": llama_index_pieces,
}
"""From a model and an index to what answers a question piece by piece, by way."""
