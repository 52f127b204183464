"""A chat model as judge, which asks again if a reply has no verdict, and stores all replies."""

from collections.abc import Sequence

from pipeline.judges import questions
from pipeline.judges.chat_model import ChatModel, Reply
from pipeline.judges.questions import pose, prompt_version, read_verdict
from pipeline.judges.reply_cache import ReplyCache, reply_key
from pipeline.judges.verdict import JudgedPrompt, Verdict
from pipeline.settings.judge_config import JudgingConfig
from ppo_core.data.rows.dialogues import shown_prompt
from ppo_core.io.folder_cache import digest_of, digest_of_code
from ppo_core.io.progress_bar import progress

Case = tuple[str, str, str]
"""(prompt, first answer, second answer)."""


class ChatJudge:
    """Asks a chat model which answer is better, and asks again if its reply has no verdict."""

    def __init__(self, chat: ChatModel, config: JudgingConfig, cache: ReplyCache) -> None:
        """Judge by `config.criterion`; replies come from the cache, or else from `chat`."""
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
        reading = digest_of_code(questions.__name__)
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
        Only replies are stored, so a later call repeats a question without a reply.

        Raises:
            JudgeError: the model cannot be asked, or the budget is spent. All earlier replies are
                stored.
        """
        cases = [(shown_prompt(prompt), *pair) for prompt, pair in zip(prompts, pairs, strict=True)]
        verdicts: dict[Case, Verdict] = {}
        undecided = list(dict.fromkeys(cases))
        for attempt in range(1, self._config.attempts + 1):
            replies = self._replies(undecided, attempt)
            verdicts |= {case: _verdict(reply) for case, reply in replies.items()}
            undecided = [
                case
                for case, reply in replies.items()
                if reply.text is not None and verdicts[case].winner == "invalid"
            ]
        return [verdicts[case] for case in cases]

    def _replies(self, cases: Sequence[Case], attempt: int) -> dict[Case, Reply]:
        """Return the reply to each case, from the cache or from the model."""
        keys = {
            case: reply_key(self._chat.version, self._wording, *case, attempt) for case in cases
        }
        kept = {case: self._cache.get(key) for case, key in keys.items()}
        replies = {case: reply for case, reply in kept.items() if reply is not None}
        missing = [case for case in cases if case not in replies]
        if not missing:
            return replies
        asked = [pose(self._config.criterion, *case, attempt=attempt) for case in missing]
        with progress(len(asked), f"judging, attempt {attempt}", "question") as bar:

            def keep(number: int, reply: Reply) -> None:
                case = missing[number]
                if reply.text is not None:
                    self._cache.put(keys[case], reply)
                replies[case] = reply
                bar.update()

            self._chat.ask(asked, keep)
        return replies


def _verdict(reply: Reply) -> Verdict:
    if reply.text is None:
        return Verdict("invalid", reason=reply.error)
    return read_verdict(reply.text)
