import logging
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_llm import TEXT, say, tiny_llm, tiny_tokenizer

from ragaccel.decoding import NoDrafter
from ragaccel.drafting import JIT_WARMUP, CopyDrafter, History, Memory, policy
from ragaccel.errors import ConfigurationError
from ragaccel.jit import JitWarmup
from ragaccel.llm import LLM

PROMPT = "Who trims the wick?"
SAID = "Nobody here knows, ask again at the mole when the tide is low and the lamp is lit."


@pytest.fixture(autouse=True)
def _compiled():
    assert JIT_WARMUP.wait(120)


def new_llm(**options):
    known = tiny_llm()
    return LLM(known.model, tiny_tokenizer(), token_budget=31, **options)


def ask(llm, prompt=PROMPT, said=SAID, **settings):
    """Make a model say something; return the answer."""
    processors = [say(llm, prompt, said)]
    return llm.generate(prompt, logits_processors=processors, max_new_tokens=99, **settings)


def test_an_earlier_answer_is_drafted_the_next_time():
    llm = new_llm()
    first, second = ask(llm), ask(llm)
    assert first.text == second.text == SAID
    assert second.stats.verify_passes < first.stats.verify_passes / 3
    assert second.stats.accepted_by_source["past answer"] > 20
    assert llm.memory.stats().requests == 2
    assert llm.memory.stats().hits == 1


def test_a_request_that_is_not_to_remember_knows_nothing_and_teaches_nothing():
    llm = new_llm()
    alone = ask(llm, remember=False)
    assert llm.memory.stats().requests == 0
    ask(llm)
    assert ask(llm, remember=False).stats.verify_passes == alone.stats.verify_passes
    assert "past answer" not in ask(llm, remember=False).stats.accepted_by_source
    assert llm.memory.stats().requests == 1


def test_namespaces_are_separate():
    llm = new_llm()
    first = ask(llm, namespace="mine")
    other = ask(llm, namespace="yours")
    assert other.stats.verify_passes == first.stats.verify_passes
    assert ask(llm, namespace="mine").stats.verify_passes < first.stats.verify_passes
    assert sorted(llm.memory.namespaces) == ["mine", "yours"]


@pytest.mark.parametrize("where", ["llm", "request"])
def test_a_drafter_of_the_callers_leaves_the_memory_alone(where):
    llm = new_llm(drafter=CopyDrafter()) if where == "llm" else new_llm()
    for _ in range(2):
        answer = ask(llm, **({} if where == "llm" else {"drafter": NoDrafter()}))
        assert answer.text == SAID
        assert "past answer" not in answer.stats.accepted_by_source
    assert llm.memory.stats().requests == 0


def test_an_answer_that_was_left_is_remembered_as_far_as_it_came():
    llm = new_llm()
    llm.stream(PROMPT)  # nobody reads it
    stream = llm.stream(PROMPT, logits_processors=[say(llm, PROMPT, SAID)], max_new_tokens=99)
    next(stream)
    stream.close()
    stats = llm.memory.stats()
    assert stats.requests == 1
    assert stats.tokens < len(llm.tokenizer.encode(PROMPT + SAID))


def test_two_models_share_nothing_unless_they_are_given_one_memory():
    shared = Memory(vocab_size=380)
    one, other, third = new_llm(memory=shared), new_llm(memory=shared), new_llm()
    first = ask(one)
    assert ask(other).stats.verify_passes < first.stats.verify_passes / 3
    assert ask(third).stats.verify_passes == first.stats.verify_passes


def test_memory_in_a_file_outlives_the_model(tmp_path):
    path = tmp_path / "answers.memory"
    llm = new_llm(memory=path)
    first = ask(llm)
    llm.memory.save()
    again = ask(new_llm(memory=str(path)))
    assert again.text == SAID
    assert again.stats.verify_passes < first.stats.verify_passes / 3


def test_a_file_of_another_vocabulary_or_a_damaged_one_is_refused_and_the_answer_comes(
    tmp_path, caplog
):
    foreign, damaged = tmp_path / "foreign", tmp_path / "damaged"
    Memory(path=foreign, fingerprint="other tokens").save()
    damaged.write_bytes(b"PK\x03\x04 no memory")
    for path in (foreign, damaged):
        before = path.read_bytes()
        with caplog.at_level(logging.WARNING, "ragaccel"):
            llm = new_llm(memory=path)
            assert ask(llm).text == SAID
        assert path.name in llm.memory.load_error
        assert llm.memory.load_error in caplog.text
        with pytest.raises(ConfigurationError):
            llm.memory.save()
        assert path.read_bytes() == before


def test_answers_are_the_models_own_whatever_is_remembered():
    llm = new_llm()
    for settings in ({}, {"temperature": 1.0, "seed": 7}):
        settings |= {"max_new_tokens": 40}
        plain = llm.generate(PROMPT, drafter=NoDrafter(), **settings).token_ids
        for _ in range(3):
            assert llm.generate(PROMPT, **settings).token_ids == plain


def test_a_prediction_is_drafted_from_the_first_token_on():
    llm = new_llm()
    without = ask(llm, remember=False)
    given = ask(llm, remember=False, prediction=SAID)
    assert given.text == without.text == SAID
    assert given.stats.verify_passes <= 4
    assert without.stats.verify_passes > 3 * given.stats.verify_passes
    several = ask(llm, remember=False, prediction=[TEXT, SAID])
    assert several.stats.verify_passes < without.stats.verify_passes / 2
    assert given.passages == ()


def new_warmup():
    return JitWarmup(JIT_WARMUP._function, JIT_WARMUP._last)


def test_before_the_jit_warm_up_ends_one_span_is_copied_and_nothing_remembered(monkeypatch):
    monkeypatch.setattr("ragaccel.drafting.policy.JIT_WARMUP", new_warmup())
    llm = new_llm(drafter=None)
    monkeypatch.setattr(JitWarmup, "is_ready", lambda self: False)
    answer = ask(llm)
    assert answer.text == SAID
    assert llm.memory.stats().requests == 0


def test_the_first_token_waits_for_no_compiler_and_later_ones_are_drafted_as_trees():
    code = (
        "import sys; sys.path[:0] = sys.argv[1:]\n"
        "from ragaccel.drafting.policy import JIT_WARMUP\n"
        "from tiny_llm import say, tiny_llm\n"
        f"prompt, said, llm = {PROMPT!r}, {SAID!r}, tiny_llm()\n"
        "stream = llm.stream(prompt, logits_processors=[say(llm, prompt, said)])\n"
        "first = next(stream)\n"
        "print('numba' in sys.modules)\n"
        "second = next(stream)\n"
        "JIT_WARMUP.wait(120)\n"
        "print(first + second + ''.join(stream) == said, 'ragaccel.drafting.trie' in sys.modules)"
    )
    paths = [str(Path(__file__).parent / "support"), *sys.path]
    done = subprocess.run(
        [sys.executable, "-c", code, *paths], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "True", "True"]


def test_what_fails_in_the_jit_warmup_costs_no_answer(monkeypatch, caplog):
    def fails():
        raise OSError("no space left")

    monkeypatch.setattr(policy, "warm_up_jit", fails)
    mine = new_warmup()
    with caplog.at_level(logging.WARNING, "ragaccel"):
        assert not mine.wait(30)
    assert "no space left" in caplog.text


def test_what_is_not_kept_is_compiled_by_another_process(monkeypatch, tmp_path):
    commands = []
    monkeypatch.setattr("ragaccel.jit.is_uncompiled", lambda function: True)
    monkeypatch.setattr(
        subprocess, "run", lambda command, **settings: commands.append((command, settings))
    )
    assert new_warmup().wait(60)
    ((command, settings),) = commands
    assert command[0] == sys.executable
    assert settings["start_new_session"]
    (tmp_path / "numpy.py").write_text("raise SystemExit('what lies here must not be run')")
    done = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    assert done.communicate(timeout=100)[1] == ""
    assert done.returncode == 0


def test_functions_that_are_never_compiled_leave_copying(tmp_path):
    code = (
        "from ragaccel.drafting.policy import JIT_WARMUP as mine\n"
        "print(mine.wait(60), mine.is_ready())"
    )
    environment = {"NUMBA_DISABLE_JIT": "1", "PATH": "", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "False"]


def test_what_a_model_learned_that_is_gone_is_saved_when_python_exits(tmp_path):
    code = (
        "import sys; sys.path[:0] = sys.argv[2:]\n"
        "from test_llm_drafting import JIT_WARMUP, ask, new_llm\n"
        "def work():\n"
        "    assert JIT_WARMUP.wait(120)\n"
        "    ask(new_llm(memory=sys.argv[1]))\n"
        "work()\n"
    )
    path = tmp_path / "file.memory"
    subprocess.run(
        [sys.executable, "-c", code, str(path), str(Path(__file__).parent), *sys.path], check=True
    )
    assert new_llm(memory=path).memory.stats().requests == 1


def test_an_answer_comes_though_it_cannot_be_remembered(monkeypatch, caplog):
    def fails(self, prompt_ids, answer_ids):
        raise MemoryError("no room")

    monkeypatch.setattr(History, "add", fails)
    with caplog.at_level(logging.WARNING, "ragaccel"):
        assert ask(new_llm()).text == SAID
    assert "no room" in caplog.text


def test_a_request_that_began_before_drafting_was_ready_is_remembered(monkeypatch):
    ready = []
    monkeypatch.setattr(JitWarmup, "is_ready", lambda self: bool(ready))
    llm = new_llm()
    stream = llm.stream(PROMPT, logits_processors=[say(llm, PROMPT, SAID)], max_new_tokens=99)
    next(stream)
    ready.append(True)
    assert stream.finish().text == SAID
    assert llm.memory.stats().requests == 1


def test_costs_are_kept_unless_the_caller_does_not_want_them(monkeypatch, tmp_path):
    monkeypatch.setenv("RAGACCEL_HOME", str(tmp_path))
    assert new_llm().engine.latency_profile.path.parent == tmp_path / "measurements"
    assert new_llm(save_measurements=False).engine.latency_profile.path is None

    def without_home():
        raise RuntimeError("could not determine home directory")

    monkeypatch.setattr("ragaccel.paths.data_dir", without_home)
    assert new_llm().engine.latency_profile.path is None


def test_an_llm_without_memory_does_not_reveal_earlier_requests():
    def acceptance(**how):
        llm = tiny_llm(save_measurements=False, token_budget=16, **how)
        lengths = [
            llm.generate("Is the patient ill?", max_new_tokens=32).stats.acceptance_length
            for _ in range(2)
        ]
        return lengths, llm.memory.namespaces

    (first, again), namespaces = acceptance()
    assert again > 2 * first
    assert namespaces == [""]
    (first, again), namespaces = acceptance(remember=False)
    assert again < 1.5 * first
    assert namespaces == []
