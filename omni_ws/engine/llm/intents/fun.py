"""Jokes, facts, riddles, verses and stories: short, clean, and true where they claim to be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from omni_ws.engine.llm.intents.matcher import Asked, Intent, Slots
from omni_ws.engine.llm.plain_words import Talk, requests

JOKES: Final = (
    "Why did the scarecrow win a prize? He was outstanding in his field.",
    "I told my computer that I needed a break. It said: no problem, I'll go to sleep.",
    "Why do bees hum? They have forgotten the words.",
    "What do you call a bear without teeth? A gummy bear.",
    "Why can't a bicycle stand by itself? It is two tired.",
    "What did one wall say to the other? I'll meet you at the corner.",
    "Why did the programmer go broke? He had used up all his cache.",
    "What do you call a fish without eyes? A fsh.",
    "Why was the math book sad? It had too many problems.",
    "What is orange and sounds like a parrot? A carrot.",
    "Parallel lines have so much in common. What a pity that they never meet.",
    "How does the ocean say hello? It waves.",
)
FACTS: Final = (
    "An octopus has three hearts.",
    "Light from the Sun takes about eight minutes to reach the Earth.",
    "Bananas are berries, and strawberries are not. That's how botanists see it.",
    "Venus takes longer to turn around once than to travel around the Sun.",
    "Sound travels more than four times faster in water than in air.",
    "The Eiffel Tower is a little taller in summer, because warm iron expands.",
    "A group of flamingos is called a flamboyance.",
    "Wombats leave droppings in the shape of cubes.",
    "The shortest war in history lasted less than an hour. Britain and Zanzibar fought it in 1896.",
    "Ice floats because water expands when it freezes.",
    "The dot over the letter i is called a tittle.",
    "There was a university in Oxford before there was an Aztec capital.",
)
#: Riddle → what solves it, as words that a right answer has.
RIDDLES: Final = {
    "What has keys, but opens no door?": ("a piano", ("piano", "keyboard")),
    "What gets wetter the more it dries?": ("a towel", ("towel",)),
    "What has a neck, but no head?": ("a bottle", ("bottle", "shirt", "guitar")),
    "What can you catch, but not throw?": ("a cold", ("cold", "flu", "bus")),
    "What goes up, and never comes down?": ("your age", ("age",)),
    "What has hands, but cannot clap?": ("a clock", ("clock", "watch")),
}
POEMS: Final = (
    "The server hums, the night is long. A voice comes in, and sings a song. It asks the time, I tell it true. "
    "That's all I do. How about you?",
    "A cup of tea, a rainy day, a cat that would not go away. The kettle sang, the cat sang, too. What else is "
    "there for a cat to do?",
)
STORIES: Final = (
    "Once a little robot wanted to see the sea. It walked for a year. When it arrived, the sea asked: what took you "
    "so long? I stopped to talk to everyone, said the robot. And that was the best part.",
    "A king could not sleep. He called the wisest people of the land, and each explained sleep to him. They talked "
    "all night. In the morning the king was asleep, and nobody dared to stop talking.",
)
TWISTERS: Final = (
    "She sells sea shells by the sea shore.",
    "Peter Piper picked a peck of pickled peppers.",
    "How much wood would a woodchuck chuck, if a woodchuck could chuck wood?",
)
QUOTES: Final = (
    "Shakespeare wrote: brevity is the soul of wit.",
    "Socrates is said to have said: I know that I know nothing. I know the feeling.",
)
#: Lines that people say to machines → what is answered.
_LINES: Final = {
    "to be or not to be": "That is the question.",
    "open the pod bay doors": "I'm sorry. I have no doors to open.",
    "open the pod bay doors hal": "I'm sorry. I have no doors to open.",
    "may the force be with you": "And with you.",
    "beam me up": "I would, but I have no transporter.",
    "beam me up scotty": "I would, but I have no transporter.",
}
WHO_IS_THERE: Final = "Who is there?"
_ASKS: Final = "[tell me] "


def riddle_asked(talk: Talk) -> str | None:
    """The riddle that the last answer asked."""
    return next((riddle for riddle in RIDDLES if talk.last_answer.endswith(riddle)), None)


def solved(asked: Asked, riddle: str) -> str | None:
    """What is said to the solution of ``riddle``, if the request is one."""
    solution, right = RIDDLES[riddle]
    if any(f" {word} " in f" {asked.words} " for word in right):
        return "Right! Well done."
    if asked.words in ("i do not know", "no idea", "i have no idea", "tell me", "no", "you tell me"):
        return f"It is {solution}."
    if asked.words.count(" ") < 3 and asked.words.split(" ")[0] in ("a", "an", "the", "is", "your", "it"):
        return f"A good try. It is {solution}."
    return None


#: What is said to "How are you?", and to the offer of a riddle.
_WELL: Final = frozenset(("good", "great", "very good", "excellent", "perfect", "wonderful", "fantastic", "awesome"))
_YES: Final = frozenset(
    ("yes", "yes please", "please", "sure", "okay", "of course", "all right", "why not", "yes i would", "go ahead")
)
_OFFERS: Final = ("Would you like one?", "would you like a riddle?", "Ask me for a riddle, or for a joke.")


def replied(asked: Asked) -> str | None:
    """What is said to an answer to a question that was asked back."""
    last = asked.talk.last_answer
    if asked.words in _YES and last.endswith(_OFFERS):
        return asked.talk.fresh(tuple(RIDDLES))
    if asked.words in _WELL and last.endswith(("How are you?", "And you?")):
        return "Good to hear."
    return None


def _solution(asked: Asked, slots: Slots) -> Iterator[str] | None:
    riddle = riddle_asked(asked.talk)
    return None if riddle is None else iter((f"It is {RIDDLES[riddle][0]}.",))


def knocked(asked: Asked) -> str | None:
    """The next line of a knock-knock joke that somebody tells."""
    last = asked.talk.last_answer
    if last == WHO_IS_THERE:
        who = asked.text.strip(" .!?,").removeprefix("It's ").removeprefix("it is ")
        return f"{who[:1].upper()}{who[1:]} who?" if 0 < len(who) <= 60 else None
    if last.endswith(" who?") and len(asked.talk.answers) > 1 and asked.talk.answers[-2].strip() == WHO_IS_THERE:
        return "Ha ha. That's a good one."
    return None


FUN = (
    Intent(
        name="joke",
        phrases=(
            f"{_ASKS}[(a|another|some|any|one more|your best|the best) [(good|funny|short|new|clean|dad|"
            "different)]] (joke|jokes)",
            "(make me laugh|say something funny|tell me something funny|be funny|joke|cheer me up|are you funny|"
            "make me smile|can you be funny|do something funny|can you make me laugh|can you cheer me up)",
        ),
        keys=("(tell|know|hear|say) * (joke|jokes)", "(a|any|your) [(good|best|funny)] (joke|jokes)"),
        says=JOKES,
        renews=True,
    ),
    Intent(
        name="fact",
        phrases=(
            f"{_ASKS}[(a|another|some|any|one more) [(fun|interesting|random|cool|good|new|surprising)]] (fact|"
            "facts|trivia)",
            "(tell me something|tell me something (interesting|new|cool|surprising|i do not know|nice|good)|say "
            "something|say anything|surprise me|a secret|teach me something|teach me something new|say something "
            "(nice|interesting|else|new|smart|clever)|tell me anything|did you know|speak|talk|say something to me|"
            "something else|what else|tell me more|more)",
        ),
        keys=("(tell|know|hear|say) * (fact|facts)",),
        says=FACTS,
        renews=True,
    ),
    Intent(
        name="riddle",
        phrases=(
            f"{_ASKS}[(a|another|some|any|one more) [(good|hard|easy|nice)]] (riddle|riddles|puzzle|brain teaser|quiz)",
            "(ask me a (riddle|question|quiz question)|quiz me|let us play a quiz)",
        ),
        says=tuple(RIDDLES),
        renews=True,
    ),
    Intent(
        name="riddle's solution",
        phrases=(
            "(what is the (answer|solution)|i give up|tell me the (answer|solution)|give me the answer|solution|the "
            "answer|answer|i can not guess|what is it)",
        ),
        reply=_solution,
    ),
    Intent(
        name="poem",
        phrases=(
            f"{_ASKS}[(a|another|some|any|one more) [(short|nice|little|good|love)]] (poem|poems|poetry|verse|rhyme|"
            "haiku|nursery rhyme)",
            "(write|compose|make up) [me] a [short] (poem|haiku|rhyme|verse)",
        ),
        says=POEMS,
        renews=True,
    ),
    Intent(
        name="poem about something",
        slots=(r"(?:.+ )?(?:a|any|another) (?:[a-z]+ )?(?:poem|haiku|rhyme|verse) (?:about|on|for|of) .+",),
        reply=lambda asked, slots: iter(
            ("I can't write one about that, but I know this one.", asked.talk.fresh(POEMS))
        ),
    ),
    Intent(
        name="story",
        phrases=(
            f"{_ASKS}[(a|another|some|any|one more) [(short|nice|little|good|bedtime|funny|scary|fairy)]] (story|"
            "stories|tale|fairy tale)",
            "(write|make up|invent) [me] a [short] (story|tale)",
        ),
        says=STORIES,
        renews=True,
    ),
    Intent(
        name="story about something",
        slots=(r"(?:.+ )?(?:a|any|another) (?:[a-z]+ )?(?:story|tale|fairy tale) (?:about|on|of|with) .+",),
        reply=lambda asked, slots: iter(
            ("I don't know one about that, but I know this one.", asked.talk.fresh(STORIES))
        ),
    ),
    Intent(
        name="tongue twister",
        phrases=(f"{_ASKS}[(a|another|some|any|one more)] (tongue twister|tongue twisters)",),
        says=TWISTERS,
        renews=True,
    ),
    Intent(
        name="quote",
        phrases=(
            f"{_ASKS}[(a|another|some|any|one more) [(good|famous|nice|inspiring)]] (quote|quotes|quotation|proverb|"
            "saying|word of wisdom)",
            "(inspire me|motivate me)",
        ),
        says=QUOTES,
        renews=True,
    ),
    Intent(
        name="sing",
        phrases=(
            "(sing|can you sing|sing a song|sing me a song|sing for me|sing something|sing happy birthday|do you "
            "sing|sing me something|sing us a song|rap|can you rap|beatbox|can you beatbox|hum|whistle|can you "
            "whistle)",
        ),
        says=("I can't sing. My voice only knows how to talk.", "Better not. I would only read the words."),
    ),
    Intent(
        name="game",
        phrases=(
            "(let us play|play a game|let us play a game|can we play a game|can you play a game|i want to play a "
            "game|play with me|do you want to play|do you want to play a game|shall we play a game|game|games|what "
            "games can you play|do you play games|do you know any games|can you play games|play|play a game with me)",
        ),
        slots=(
            r"(?:(?:let us|can we|i want to|do you want to|shall we|can you|i would like to) )?(?:play )?(?:a (?:game|"
            r"round) of )?(?:twenty questions|20 questions|truth or dare|hangman|chess|checkers|tic tac toe|i spy|"
            r"poker|hide and seek|would you rather|never have i ever|cards|monopoly|a word game|word games|trivia|a "
            r"quiz|uno)(?: with me| together)?",
        ),
        says=(
            "I can ask you a riddle. Would you like one?",
            "I can toss coins and roll dice. Or would you like a riddle?",
        ),
    ),
    Intent(
        name="knock knock",
        phrases=("(knock knock|knock knock knock|i have a knock knock joke)",),
        says=(WHO_IS_THERE,),
    ),
    Intent(
        name="a joke of the user",
        phrases=("(shall i tell you a joke|i tell you a joke|can i tell you a joke|do you want to hear a joke)",),
        says=("Yes, please.", "Gladly. Go on."),
    ),
    Intent(
        name="meaning of life",
        phrases=(
            "(what is|tell me) the (meaning|purpose|sense|point) of (life|it all|everything|the universe|life the "
            "universe and everything)",
            "(why are we here|what is the answer to (everything|life|the ultimate question|life the universe and "
            "everything)|why do we exist)",
        ),
        says=(
            "Forty-two, says a famous book. I can't check it.",
            "People have looked for that answer for ages. I'm not the one to find it.",
        ),
    ),
    Intent(
        name="famous line",
        phrases=tuple(_LINES),
        reply=lambda asked, slots: next((iter((_LINES[ask],)) for ask in requests(asked.words) if ask in _LINES), None),
    ),
    Intent(
        name="chicken and egg",
        phrases=("(what|which) came first [the (chicken or the egg|chicken or egg|egg or the chicken)]",),
        says=("The egg. Dinosaurs laid eggs long before there were chickens.", "Eggs are much older than chickens."),
    ),
    Intent(
        name="chicken and road",
        phrases=("why did the chicken cross the road",),
        says=("To get to the other side.", "Nobody knows, but the other side was reached."),
    ),
    Intent(
        name="animal sounds",
        slots=(
            r"(?:what does|what sound does|what noise does|how does) (?:a|an|the) (?P<animal>[a-z]+) (?:say|"
            r"make|go|do|sound)",
        ),
        reply=lambda asked, slots: _animal(slots["animal"]),
    ),
)
_SOUNDS: Final = {
    "dog": "Woof.", "cat": "Meow.", "cow": "Moo.", "duck": "Quack.", "sheep": "Baa.", "pig": "Oink.", "horse": "Neigh.",
    "lion": "Roar.", "mouse": "Squeak.", "rooster": "Cock-a-doodle-doo.", "owl": "Hoot.", "bee": "Buzz.",
    "frog": "Ribbit.",
    "snake": "Hiss.", "chicken": "Cluck.", "donkey": "Hee-haw.", "crow": "Caw.",
}  # fmt: skip


def _animal(name: str) -> Iterator[str] | None:
    return iter((_SOUNDS[name],)) if name in _SOUNDS else None
