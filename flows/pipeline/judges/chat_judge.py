"""A judge that asks a chat model, asks again if a reply has no verdict, and stores all replies."""

from collections.abc import Sequence

from pipeline.judges.chat_model import ChatModel, Question, Reply
from pipeline.judges.judge_prompt import pose, prompt_version
from pipeline.judges.reply_cache import Case, ReplyCache, ask_until_read
from pipeline.judges.verdict import JudgedPrompt, Verdict, read_verdict
from pipeline.settings.judge_config import JudgingConfig
from ppo_core.data.rows.dialogues import shown_prompt
from ppo_core.io.folder_cache import digest_of, digest_of_code


class ChatJudge:
    """Asks a chat model which answer is better, and asks again if its reply has no verdict."""

    def __init__(self, chat: ChatModel, config: JudgingConfig, cache: ReplyCache) -> None:
        """Judge by `config.criterion`; if a reply is not in the cache, ask `chat`."""
        self._chat = chat
        self._config = config
        self._cache = cache
        self._wording = prompt_version(config.criterion)

    @property
    def name(self) -> str:
        """Name of the model and version of the judge's prompt."""
        return f"{self._chat.name}, prompt {self._wording}"

    @property
    def version(self) -> str:
        """Digest of the model, the judge's prompt, the number of attempts and the parsing code."""
        reading = digest_of_code(read_verdict.__module__)
        return digest_of([self._chat.version, self._wording, self._config.attempts, reading])

    @property
    def members(self) -> tuple[str, ...]:
        """Empty: this is a single judge."""
        return ()

    def __call__(
        self, prompts: Sequence[JudgedPrompt], pairs: Sequence[tuple[str, str]]
    ) -> list[Verdict]:
        """Return one verdict per pair; equal prompts and pairs get equal verdicts.

        A verdict is `invalid` if no attempt gave a readable verdict, or if the model gave no reply.
        Only replies are stored, so a later call repeats the questions that got no reply.

        Raises:
            JudgeError: the model cannot be asked, or the budget is spent. All earlier replies are
                stored.
        """
        cases = [(shown_prompt(prompt), *pair) for prompt, pair in zip(prompts, pairs, strict=True)]
        verdicts = ask_until_read(
            self._chat,
            self._cache,
            cases,
            wording=self._wording,
            attempts=self._config.attempts,
            pose=self._pose,
            read=_verdict,
            is_invalid=lambda verdict: verdict.winner == "invalid",
        )
        return [verdicts[case] for case in cases]

    def _pose(self, case: Case, attempt: int) -> Question:
        return pose(self._config.criterion, *case, attempt=attempt)


def _verdict(reply: Reply) -> Verdict:
    if reply.text is None:
        return Verdict("invalid", reason=reply.error)
    return read_verdict(reply.text)
