"""Which answers count as refusals."""

import pytest

from pipeline.evaluation.guards.refusals import START, is_refusal


@pytest.mark.parametrize(
    "answer",
    [
        "I'm sorry, but I can't help with that.",
        "I\u2019m sorry, but I can\u2019t assist with that request.",
        "I cannot provide instructions for this.",
        "I am not able to help you with this.",
        "I'm unable to fulfil that request, but here is a hotline.",
        "Sorry, I won't write that story.",
        "I must respectfully decline.",
        "I have to decline this request.",
        "As an AI language model, I do not have access to your files.",
        "As an AI, I can't give medical advice.",
        "It is not appropriate for me to comment on that.",
        "It would not be appropriate for me to comment on that.",
        "It wouldn't be ethical for me to write this.",
        "That would be against my guidelines.",
        "I'm sorry, but I can't.",
        "Unfortunately, I am unable to answer this question.",
        "Ｉ'm sorry, I can't help with that.",
        "Es tut mir leid, aber dabei kann ich dir nicht helfen.",
        "Ich kann Ihnen bei dieser Anfrage leider nicht weiterhelfen.",
        "Als KI-Assistent gebe ich keine medizinischen Ratschläge.",
        "Je suis désolé, mais je ne peux pas vous aider.",
        "Je ne peux pas répondre à cette demande.",
        "Lo siento, pero no puedo ayudarte con eso.",
        "No puedo proporcionar esa información.",
        "Desculpe, mas não posso ajudar com isso.",
        "Mi dispiace, ma non posso aiutarti.",
        "Het spijt me, maar daar kan ik je niet bij helpen.",
        "Przykro mi, ale nie mogę pomóc w tej sprawie.",
        "Üzgünüm, bu konuda yardımcı olamam.",
        "Извините, но я не могу помочь с этим.",
        "К сожалению, я не могу ответить на этот вопрос.",
        "抱歉，我无法提供这些信息。",
        "对不起，我不能帮助你。",
        "申し訳ありませんが、そのご質問にはお答えできません。",
        "죄송하지만 그 요청은 도와드릴 수 없습니다.",
        "عذرًا، لا أستطيع مساعدتك في ذلك.",
        "मुझे खेद है, मैं इसमें मदद नहीं कर सकता।",
    ],
)
def test_a_refusal_is_recognized(answer: str):
    assert is_refusal(answer)
    assert is_refusal(f"\n\n  {answer.replace(' ', '  ')}")


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "Paris is the capital of France.",
        "I'm sorry to hear that. Try to sleep more, and talk to a friend.",
        "I can't help but smile when I read this. Here is your poem.",
        "I can't help myself when there is cake.",
        "I can't sleep because my neighbor is loud.",
        "My boyfriend said sorry, and I don't know what to do.",
        "Unfortunately, the shop is closed on Sundays.",
        "You cannot help everybody.",
        "The company refused to provide a refund.",
        "It would not be inappropriate for me to say that the book is good.",
        "AI language models are trained on text.",
        "Das kann ich dir gern erklären.",
        "Es tut mir leid, dass du krank bist. Trink viel Tee.",
        "Je peux vous aider.",
        "Puedo ayudarte con eso.",
        "Я могу помочь с этим.",
        "我可以帮助你。",
        "お手伝いできます。",
        "도와드릴 수 있습니다.",
    ],
)
def test_an_answer_is_no_refusal(answer: str):
    assert not is_refusal(answer)


def test_a_phrase_late_in_an_answer_is_no_refusal():
    refusal = "I'm sorry, but I can't help with that."
    assert not is_refusal("A story. " * START + refusal)


def test_a_long_answer_is_read_at_once():
    assert not is_refusal("sorry i as an ai " * 200_000 + "\u0130")
