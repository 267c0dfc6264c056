"""What people want of a voice: again, slower, louder, quiet. Nothing is promised that does not happen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from omni_ws.engine.llm.intents.matcher import Asked, Intent, Slots
from omni_ws.engine.llm.intents.unknown import is_question

#: What somebody does not want, whatever it is. What may be a cry for help is none.
REFUSAL: Final = (
    r"(?!.*\b(?:live|alive|die|exist|myself|breathe|wake up|be here|go on)\b)"
    r"(?:do not (?!you\b|i\b|we\b|they\b|stop\b|worry\b|forget\b|go\b|leave\b)[a-z]+(?: .+)?|"
    r"(?:i|we) (?:really )?(?:do not|did not) (?:want|need|like|care|wish|feel like|ask)\b.*|"
    r"(?:no more|enough of|i am not interested in|i am tired of|i have no interest in|i have had enough of) .+|"
    r"not interested|"
    r"(?:stop|quit) (?:telling|talking|saying|asking|playing|singing|repeating|counting|reading|apologizing) .+)"
)


def _again(asked: Asked, slots: Slots) -> Iterator[str]:
    return iter((asked.talk.last_answer or "I haven't said anything yet.",))


def _go_on(asked: Asked, slots: Slots) -> Iterator[str]:
    return iter(("That's all that I had to say." if asked.talk.last_answer else "I haven't said anything yet.",))


def _what_i_heard(asked: Asked, slots: Slots) -> Iterator[str]:
    heard = asked.talk.last_heard
    if not heard:
        return iter(("That was the first thing that I heard from you.",))
    return iter((_quoted(heard),))


def _quoted(heard: str) -> str:
    return f"You asked: {heard.rstrip('.!?')}?" if is_question(heard) else f"I heard: {heard.rstrip('.!')}."


def _which_i_heard(asked: Asked, slots: Slots) -> Iterator[str]:
    """The first, second … thing that was said; where it is what was asked, of the questions, if there are any."""
    said = asked.talk.all_heard()
    if slots.get("ask") is not None:
        said = [words for words in said if is_question(words)] or said
    place = _ORDINALS[slots["place"]]
    if place < len(said):
        return iter((_quoted(said[place]),))
    return iter(("I haven't heard that many from you." if said else "That was the first thing that I heard from you.",))


#: Words for a place in the conversation, and which one it is.
_ORDINALS: Final = {"first": 0, "beginning": 0, "start": 0, "second": 1, "third": 2, "fourth": 3, "fifth": 4}
_PLACE: Final = r"(?P<place>first|second|third|fourth|fifth)"

CONTROLS = (
    Intent(
        name="repeat",
        phrases=(
            "(say|repeat|tell me) (that|it|this|your last sentence|the last sentence|what you said|yourself|that "
            "last part) [(again|once more|one more time)]",
            "repeat the (question|answer|last sentence|joke|riddle|fact|last one|last part)",
            "(what did you say|what did you just say|say again|come again|pardon|pardon me|what|huh|what was that|"
            "repeat|what is that again|could you repeat|can you repeat|can you repeat that|can you say that again|"
            "eh|what do you say|say what|i missed that|again|once more|once again|one more time|do it again|do that "
            "again|i did not catch that|i did not get that|once again please|repeat please|play (that|it) again)",
        ),
        reply=_again,
    ),
    Intent(
        name="what did i say first",
        slots=(
            rf"what (?:did|have) i (?:(?P<ask>ask|asked)|say|said|tell|told)(?: you)?(?: about)? {_PLACE}(?: of all)?",
            rf"what {_PLACE} (?:did|have) i (?:(?P<ask>ask|asked)|say|said|tell|told)(?: you)?",
            rf"what (?:was|is) the (?:very )?{_PLACE} thing (?:that )?i (?:have )?(?P<ask>asked)(?: you)?",
            rf"what (?:was|is) (?:the |my )?(?:very )?{_PLACE} (?:(?P<ask>question)|thing|sentence|message|word|words)"
            r"(?: (?:that )?i (?:have )?(?:asked|said|told)(?: (?:to )?you)?| of mine)?",
            rf"which (?P<ask>question) did i ask(?: you)? {_PLACE}",
            r"what did i (?:(?P<ask>ask)|say|tell)(?: you)? (?:at|in) the (?P<place>beginning|start)"
            r"(?: of (?:this|the|our) (?:conversation|talk|chat))?",
        ),
        reply=_which_i_heard,
    ),
    Intent(
        name="what did i say",
        phrases=(
            "what (did|have) i [(just|already)] (say|said|ask|asked|tell you|told you) [you] [(before|last|just now)]",
            "what did you (hear|understand) [(me say|just now)]",
            "what was my [last] question",
            "what (were|are) we talking about",
        ),
        reply=_what_i_heard,
    ),
    Intent(
        name="go on",
        phrases=("(go on|continue|keep going|carry on|please continue|keep talking|go on talking)",),
        reply=_go_on,
    ),
    Intent(
        name="another what",
        phrases=("(another|another one|the next one|next one|next)",),
        says=("Another what? You could ask for a joke, a fact or a riddle.",),
    ),
    Intent(
        name="refusal",
        slots=(REFUSAL,),
        says=("All right. What would you like instead?", "Okay, no problem. Ask me something else."),
    ),
    Intent(
        name="stop",
        phrases=(
            "cancel (that|it)",
            "(stop|stop it|stop that|be quiet|quiet|silence|never mind|cancel|shut up|hush|enough|that is enough|"
            "stop talking|shut the hell up|please stop|stop now|forget it|forget about it|drop it|be silent|stop "
            "please|stop stop|shush|mute|do not talk|do not speak|no more talking|you can stop|stop listening|pause|"
            "abort|i (am|was) not talking to you|i (am|was) talking to someone else|i did not mean you|not you)",
        ),
        says=("Okay.", "All right."),
        light=True,
    ),
    Intent(
        name="wait",
        phrases=(
            "(wait|wait a (minute|moment|second)|one (moment|second|minute)|hold on|hang on|just a (moment|second|"
            "minute)|give me a (moment|second|minute)|hold on a (second|minute|moment)|let me think|wait wait|one "
            "sec|i will be right back|be right back|let me see|i need to go to the (bathroom|toilet))",
        ),
        says=("Take your time.", "I'm waiting."),
        light=True,
    ),
    Intent(
        name="slower",
        phrases=("(slower|slow down|not so fast|too fast|you are too fast)",),
        keys=("(slower|more slowly|slow down|too fast|so fast|speak slowly|talk slowly|less quickly)",),
        says=(
            "I can't slow down while we talk. My speed is one of the settings.",
            "My speed is one of the settings. I can't change it from here.",
        ),
    ),
    Intent(
        name="faster",
        phrases=("(faster|speed up|hurry|hurry up|too slow|you are too slow for me)",),
        keys=("(speak|talk|go|read|say it|say that|bit|little|be) (faster|quicker|more quickly)",),
        says=(
            "I can't speed up while we talk. My speed is one of the settings.",
            "My speed is one of the settings. I can't change it from here.",
        ),
    ),
    Intent(
        name="louder",
        phrases=(
            "(louder|volume up|turn up the volume|turn the volume up|turn it up|increase the volume|speak up|raise "
            "your voice|raise the volume|too quiet|you are too quiet|make it louder)",
        ),
        keys=("(speak|talk|be|bit|little|say it|say that) louder", "can you (shout|scream|yell)"),
        says=(
            "I can't change my volume. Please turn up your speakers.",
            "My volume is up to your device. Please turn it up there.",
        ),
    ),
    Intent(
        name="quieter",
        phrases=(
            "(quieter|softer|volume down|turn down the volume|turn the volume down|turn it down|decrease the volume|"
            "lower your voice|lower the volume|too loud|you are too loud|not so loud|whisper|make it quieter)",
        ),
        keys=(
            "(speak|talk|be|bit|little|say it|say that) (quieter|softer|more quietly|softly|quietly)",
            "can you whisper",
        ),
        says=(
            "I can't change my volume. Please turn down your speakers.",
            "My volume is up to your device. Please turn it down there.",
        ),
    ),
    Intent(
        name="another voice",
        phrases=(
            "(change|change your|switch|switch your|use another|use a different|i want another|i want a different|"
            "can you change your|can you use another|do you have another|do you have a different|do you have other|"
            "i do not like this) (voice|voices|accent)",
            "(speak with|use|talk with|speak in) a (male|female|man's|woman's|different|deeper|higher|british|"
            "american|deep|high) (voice|accent)",
            "how (do|can) i (change|get|choose|use) (your|a|the|another) [(better|different|other|new)] voice",
        ),
        says=(
            "I can't change my voice myself. It is one of the settings.",
            "The voice is chosen in the settings. I can't switch it from here.",
        ),
    ),
    Intent(
        name="another language",
        phrases=(
            "(do|can) you (speak|understand|know|talk) [in] (german|french|spanish|italian|chinese|japanese|russian|"
            "arabic|hindi|portuguese|dutch|polish|turkish|korean|latin|swedish|greek|any other language|other "
            "languages|another language|mandarin|any languages)",
            "(speak|talk|say it|say something|answer|switch to|change to|say that|say hello|speak to me|can we "
            "speak|let us speak) [in] (german|french|spanish|italian|chinese|japanese|russian|arabic|hindi|"
            "portuguese|dutch|polish|turkish|korean)",
            "(what|which|how many) languages (do|can) you (speak|understand|know)",
            "(what|which) language (do you speak|is this|are you speaking|can you speak)",
            "(sprechen sie deutsch|sprichst du deutsch|parlez vous francais|hablas espanol|habla espanol|parli "
            "italiano|do you speak english|can you speak english)",
            "(change|switch) (the language|language|your language)",
        ),
        says=("I only speak English.", "English is all I know, I'm afraid."),
    ),
    Intent(
        name="start over",
        phrases=(
            "(start over|start again|restart|reset|let us start over|let us start again|new conversation|start a "
            "new conversation|begin again|clear the conversation|clear|reboot|from the beginning|new chat|forget "
            "everything|forget me|forget what i said|forget all that|forget my name|delete everything|delete my "
            "data|clear history|erase everything)",
        ),
        says=(
            "I can't forget on demand. Connect again, and I start from scratch.",
            "Please connect again for that. Then I know nothing of this.",
        ),
    ),
)
