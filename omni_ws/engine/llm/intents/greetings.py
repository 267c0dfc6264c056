"""Greetings, thanks and farewells."""

from __future__ import annotations

from collections.abc import Iterator

from omni_ws.engine.llm.intents.matcher import Asked, Intent, Slots
from omni_ws.engine.llm.intents.names import name_told

_GREETINGS = ("Hello. How can I help you?", "Hi. What can I do for you?", "Hello again. I am listening.")


def _greet(asked: Asked, slots: Slots) -> Iterator[str]:
    greeting = asked.talk.fresh(_GREETINGS)
    if (name := name_told(asked.talk)) is not None:
        greeting = asked.talk.fresh((f"Hello, {name}. How can I help you?", f"Hi, {name}. I am listening."))
    return iter((greeting,))


GREETINGS = (
    Intent(
        name="hello",
        phrases=(
            "(hello|hi|hey|howdy|greetings|hiya|hallo|yo) [(there|everyone|again|my friend|you)]",
            "(hello hello|hi hi|hey hey|good day|hello world|hello to you|say (hello|hi))",
        ),
        slots=(
            r"(?:hello|hi|greetings) from .+",
            r"(?:my .+|someone|we|i|he|she|they) (?:also )?(?:want|wants|would like) to "
            r"(?:say (?:hello|hi)|talk to you|speak to you|meet you)",
        ),
        reply=_greet,
        light=True,
    ),
    Intent(
        name="good morning",
        phrases=("(good morning|morning) [(to you|everyone|computer|sunshine)]",),
        says=("Good morning. How can I help you?", "Good morning to you."),
        light=True,
    ),
    Intent(
        name="good afternoon",
        phrases=("good afternoon [(to you|everyone|computer)]",),
        says=("Good afternoon. How can I help you?", "Good afternoon to you."),
        light=True,
    ),
    Intent(
        name="good evening",
        phrases=("good evening [(to you|everyone|computer)]",),
        says=("Good evening. How can I help you?", "Good evening to you."),
        light=True,
    ),
    Intent(
        name="good night",
        phrases=(
            "(good night|night night|sleep well|sweet dreams) [(to you|everyone|computer|then)]",
            "good night [and] (sleep well|sweet dreams)",
        ),
        says=("Good night. Sleep well.", "Good night, and sweet dreams."),
        light=True,
    ),
    Intent(
        name="other greetings",
        phrases=(
            "(bonjour|hola|ciao|guten tag|guten morgen|salut|namaste|konnichiwa|ni hao|buenos dias|ola|ahoy) "
            "[(como estas|que tal|comment allez vous|comment ca va|ca va|wie geht es ihnen|wie geht es dir|"
            "wie geht's|come stai)]",
        ),
        says=("Hello to you. I only speak English.", "Hello! I'm afraid that I only know English."),
    ),
    Intent(
        name="how are you",
        phrases=(
            "how are (you|things|you all) [(doing|feeling|today|doing today|feeling today|tonight|now|going|this "
            "morning)]",
            "how (do you do|do you feel|is it going|is everything|have you been|you doing|goes it|is life|about you)",
            "how (is|was) your (day|morning|evening|night|weekend|week) [going] [so far]",
            "are you (okay|well|all right|fine|good|happy|having a good day) [today]",
            "(you okay|you all right|(hell|hello|howl) are you|i hope you are well|and you|what about you|"
            "and how are you)",
        ),
        says=(
            "I'm doing well, thank you. How are you?",
            "All is well here, thanks for asking. And you?",
            "I'm fine, thank you.",
        ),
    ),
    Intent(
        name="what is new",
        phrases=(
            "(what is|what) (up|new|happening|going on|cooking|the matter) [(with you|today|man|dude|there)]",
            "what are you (doing|up to) [(now|right now|today|tonight)]",
            "(sup|anything new|what do you do all day|what have you been doing)",
        ),
        says=("Not much. I was waiting for somebody to talk to me.", "Nothing much. I'm listening to you."),
    ),
    Intent(
        name="user is well",
        phrases=(
            "(i am|i feel|i am feeling|i am doing|we are|doing) (fine|good|great|well|okay|very well|all right|happy|"
            "excited|excellent|wonderful|fantastic|not bad|pretty good|quite well|so happy) [(too|today|as well|thank "
            "you|thanks)]",
            "(fine|not bad|pretty good|could be better|so so|very well|all good|doing fine) [(thank you|thanks|today)]",
            "(i am having|i had) a (good|great|nice|wonderful|lovely) (day|time|morning|evening)",
        ),
        says=("Good to hear.", "I'm glad to hear it.", "That's nice."),
    ),
    Intent(
        name="user is well and asks",
        keys=(
            "(fine|good|great|okay|well|all right|not bad) [(thanks|thank you)] (and you|how about you|what about "
            "you|how are you)",
            "(fine|good|great|okay|well|all right|not bad) [(thanks|thank you)] and (how are you|how about you|"
            "yourself)",
        ),
        phrases=(
            "[i am] (fine|good|great|well|very well|pretty good|not bad|doing well|doing good|okay) [(thanks|thank "
            "you)] [and] (yourself|you|how are you|how about you|what about you) [(doing|today)]",
        ),
        says=("Good to hear. I'm fine, too.", "I'm glad. All is well here, too."),
    ),
    Intent(
        name="nice to meet you",
        phrases=(
            "(it is|it was) [so] (nice|good|great|lovely|a pleasure) (to meet|meeting|talking to|talking with|to "
            "talk to) you",
            "(nice|good|great|lovely|pleased|glad) (to meet|meeting|talking to|talking with|to talk to|to see|"
            "seeing) you [(too|today|again)]",
            "(how nice to meet you|i am (happy|glad|pleased) to meet you|welcome|welcome back|long time no see)",
        ),
        says=("Nice to meet you, too.", "The pleasure is mine."),
        light=True,
    ),
    Intent(
        name="thanks",
        phrases=(
            "(thank you|thanks) [(very much|so much|a lot|again|very much indeed|a million|for that|for everything|"
            "for your help|for the help|for telling me|for listening|anyway|for your time|for helping me|for "
            "helping|for asking)]",
            "(many thanks|sam que|think you|thank hue|(great|cool|perfect|okay|good|nice|wonderful) (thanks|thank "
            "you)|thanks that was (helpful|great|nice|good|very helpful|useful)|cheers|thank you and good bye|i "
            "appreciate it|i appreciate that|much appreciated|thank you kindly)",
        ),
        slots=(
            r"(?:thank you|thanks)(?: (?:very much|so much|a lot|again))? (?:for|you have been|you are|you were|that "
            r"was|that is|that helped|it was|this was) .+",
        ),
        says=("You're welcome.", "My pleasure.", "Any time."),
        light=True,
    ),
    Intent(
        name="goodbye",
        phrases=(
            "(good bye|bye|bye bye|farewell|so long|ciao ciao|adios|take care|cheerio) [(now|then|for now|computer|"
            "my friend)]",
            "see you [(later|soon|tomorrow|around|then|again|next time)]",
            "(i have to go|i got to go|i have got to go|i must go|i am leaving|i am going now|until next time|talk "
            "to you later|have a (nice|good|great) (day|evening|night|weekend|one)|catch you later|that is all for "
            "today|i am off)",
            "(good bye and (thanks|thank you)|hang up|end the call|end the conversation|quit|exit|log off|log out|"
            "say good bye|end (program|call|conversation)|i will be back|i am done|we are done)",
        ),
        says=("Goodbye.", "Bye. It was nice to talk to you.", "See you."),
        light=True,
    ),
    Intent(
        name="good wishes",
        phrases=(
            "(merry christmas|happy (new year|easter|halloween|thanksgiving|holidays|valentines day|new year's eve))",
            "(happy holidays to you|happy new year to you|merry christmas to you|have fun|good luck|all the best)",
        ),
        says=("Thank you. The same to you.", "Thanks, and all the best to you, too."),
    ),
    Intent(
        name="happy birthday",
        phrases=("happy birthday [to you]",),
        says=("Thank you, though programs have no birthdays.", "Thank you. That's kind."),
    ),
    Intent(
        name="user's birthday",
        phrases=("it is my birthday [today]", "today is my birthday"),
        says=("Happy birthday to you!", "Happy birthday! I hope that it is a good one."),
    ),
    Intent(
        name="bless you",
        phrases=("(bless you|god bless you|gesundheit|god bless)",),
        says=("Thank you.", "That's kind of you."),
    ),
)
