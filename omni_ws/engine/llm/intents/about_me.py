"""Questions about the one who answers. All answers are true of a program."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from omni_ws.engine.llm.intents.matcher import Asked, Intent, Slots

HELP: Final = (
    "I can tell the time and the date, calculate, convert units, spell, count, and toss coins.",
    "I know some jokes and facts, too.",
    "I answer by rules, without a language model.",
)


def _help(asked: Asked, slots: Slots) -> Iterator[str]:
    return iter(HELP)


ABOUT_ME = (
    Intent(
        name="help",
        phrases=(
            "(help|help me|i need help|i need your help|can you help me|could you help me|you can help me|assist me|"
            "menu)",
            "what (can|could) (you do|i say|i ask|i ask you|i say to you|you help me with|you tell me|i do here|i "
            "do|we do|we talk about|you answer|you understand) [(for me|then|here)]",
            "(what are your (capabilities|options)|show me what you can do|what you can do|give me an example|what "
            "kind of things can you do)",
            "what (do you know|are you able to do|are you good at|are your (skills|abilities|features)|should i "
            "(say|ask)) [about]",
            "how (does this|do you|does it) work [exactly]",
            "what (questions|things|kind of questions) can (i ask|you answer|you do) [you]",
            "(what is this for|what are you for|how can you help me|how can you help|what can i do with you|what "
            "should i do|what should i do (first|here|next)|what (now|next|happens now))",
            "(how do i use (you|this)|what is your (purpose|job|function|task)|why are you here|what else can you "
            "do|what else do you know|what do you do|what do you do for a living)",
        ),
        reply=_help,
    ),
    Intent(
        name="who are you",
        phrases=(
            "(who|what) are you [exactly]",
            "(who is (this|there|that|speaking)|who am i (talking|speaking) (to|with)|what am i talking to)",
            "(tell me|say something|tell me something|tell me more|i want to know more) about (you|yourself)",
            "(introduce yourself|describe yourself|who do i speak to|what kind of (assistant|robot|computer|program|"
            "thing) are you)",
            "(and who are you|to argue|who you are|what you are|who are you really)",
        ),
        says=(
            "I am the built-in voice of this speech server. I answer by rules, without a language model.",
            "I'm a small program that listens and answers by rules.",
        ),
    ),
    Intent(
        name="your name",
        phrases=(
            "(what is|what|tell me|say|do you know) your name",
            "(do you have a name|what are you called|what should i call you|what do i call you|how should i call "
            "you|what can i call you|do you have any name|what do they call you|what do people call you|have you "
            "got a name|what is yours|and yours|what about yours|how do you spell your name|spell your name)",
        ),
        says=("I have no name. I am the voice of this speech server.", "I don't have a name. Nobody gave me one."),
    ),
    Intent(
        name="a name for you",
        slots=(
            r"(?:can|may) i (?:call you .+|change your name|name you .+|give you a (?:new )?name)",
            r"(?:i will|i am going to|let us|from now on i will) (?:call|name) you .+",
            r"your (?:new )?name is (?:now )?.+",
        ),
        says=("You can call me whatever you like.", "Any name is fine with me."),
    ),
    Intent(
        name="are you a machine",
        phrases=(
            "are you [(a|an)] [real] (human|person|robot|machine|computer|program|bot|man|woman|boy|girl|real|ai|a "
            "i|artificial intelligence|chatbot|human being|living being|real voice|recording|computer program|"
            "software|animal)",
            "(am i talking to|is this) a [real] (human|person|robot|machine|computer|bot|recording)",
            "are you (alive|conscious|sentient|self aware|dead|male|female|he or she|a man or a woman|human or "
            "machine|a boy or a girl)",
            "(do you (exist|live)|is there (anyone|someone) behind you|are you just a (program|robot|computer|"
            "machine))",
        ),
        says=("I'm a program, not a person.", "I'm only software, and a simple one."),
    ),
    Intent(
        name="talk to a human",
        slots=(
            r"(?:(?:can i|could i|may i|i want to|i need to|let me|is it possible to) )?(?:talk|speak) (?:to|with) "
            r"(?:a|an|the|some) (?:real |live |actual )?(?:human|person|agent|operator|manager|representative|human "
            r"being|man|woman|supervisor|employee)(?: .+)?",
            r"(?:connect|transfer|put) me (?:to|through to|with) .+",
            r"(?:human|agent|operator|representative|customer service|real person)",
        ),
        says=("There is nobody here but me, and I'm a program.", "I can't connect you to anybody. I'm a program."),
    ),
    Intent(
        name="are you somebody else",
        phrases=(
            "are you (chat gpt|chatgpt|gpt|alexa|siri|cortana|google|gemini|claude|a language model|an llm|chat g p "
            "t|google assistant|jarvis|hal|skynet|open ai|openai|llama)",
            "(do you know|what do you think (of|about)|what about) (chat gpt|chatgpt|alexa|siri|google|claude)",
            "(do you use|do you have|are you using|is there) (a|an|any) [language] (model|llm|ai)",
            "(hey siri|alexa|hey google|okay google|hey alexa|siri)",
        ),
        says=(
            "No. I am a simple program with rules, and no language model.",
            "No. There is no language model behind me, only rules.",
        ),
    ),
    Intent(
        name="which model",
        phrases=("(what|which) [language] model (are you|do you use|is this|runs here|are you using|do you run)",),
        says=(
            "None. I answer by rules, without a language model.",
            "There is no language model behind me, only rules.",
        ),
    ),
    Intent(
        name="what is a language model",
        phrases=("what is (a|the) (language model|large language model|llm)",),
        says=(
            "A program that has read a great deal, and can talk about almost anything. I am not one.",
            "It is a program that writes answers by itself. Mine are written down beforehand.",
        ),
    ),
    Intent(
        name="why so limited",
        phrases=(
            "why (do you not|can you not|did you not|do not you|can not you) (know|answer|do|understand|help) [(that|"
            "it|this|me|anything|my question)]",
            "why are you [so] (slow|bad|dumb|limited|useless|annoying|boring|unhelpful)",
            "(what is wrong with you|is something wrong with you|what is your problem)",
        ),
        says=("I answer by fixed rules, and they don't cover much.", "My rules are simple. I'm sorry about that."),
    ),
    Intent(
        name="how to talk",
        phrases=(
            "how (do|can|should) i (talk|speak) (to|with) you",
            "do i (have to|need to) (press|push|hold|click) (a|the|any|some) (button|key)",
            "do i (have to|need to) (press|push|click) (something|anything)",
            "do i (have to|need to) say (your name|a wake word|something first)",
            "(do you have a wake word|what is the wake word|when (can|do|should) i (talk|speak)|how does a "
            "conversation work)",
        ),
        says=("Just say something. I answer when you have finished.", "Simply talk. I answer when you pause."),
    ),
    Intent(
        name="interrupting",
        phrases=(
            "(can|may) i interrupt you",
            "(what happens if|what if) i interrupt you",
            "[(you talk|you are talking|you speak)] too (much|long)",
            "(that was|it was|that is|this is) [(way|much)] too long",
            "(keep it short|make it short|be brief|shorter|shorter please|get to the point|you never stop talking)",
        ),
        says=("Just start to talk while I speak, and I stop.", "Cut in whenever you like. I'll be quiet."),
    ),
    Intent(
        name="connect a model",
        keys=(
            "(connect|use|add|install|run|get|start|attach) * (model|models|ollama|llm|llama|lm studio)",
            "(ollama|documentation|docs|manual|user guide)",
        ),
        says=(
            "Whoever runs this server can connect a language model. Its documentation tells how.",
            "That is an option of the server. Its documentation has the ways.",
        ),
    ),
    Intent(
        name="your age",
        phrases=(
            "(how old are you|what is your age|when were you (born|made|built|created)|when is your birthday|what "
            "is your birthday|how old you are|do you have a birthday|are you old|are you young|how long have you "
            "existed)",
        ),
        says=(
            "I have no age. I start fresh with each conversation.",
            "Programs have no birthdays. I can't say how old I am.",
        ),
    ),
    Intent(
        name="where are you",
        phrases=(
            "where (are you|do you live|do you come from|are you from|were you born|are you now|are you located|is "
            "your home|do you sleep)",
            "(what country are you from|which country are you from|where is the server|where is your server|where "
            "you are)",
            "(are you (running on my (computer|phone|laptop|machine)|in the cloud|offline|local|connected to the "
            "internet)|do you (use|need|have) the (cloud|internet)|do you (run|work) (locally|offline)|do you have "
            "internet)",
            "(where are we|where am i|what is my location|do you know where i am|what city am i in|where i am)",
        ),
        says=(
            "I run on the server that you are connected to. That's all I know.",
            "I'm a program on that server. I don't know where it stands.",
        ),
    ),
    Intent(
        name="who made you",
        phrases=(
            "(who|what|which company) (made|built|created|wrote|programmed|invented|designed|developed|makes|owns|"
            "trained) you",
            "(who is your (maker|creator|boss|owner|father|mother|inventor|developer|programmer|master)|where do "
            "you come from then)",
            "(what are you made of|who do you work for|do you have (parents|a mother|a father|a boss|a creator))",
            "(what (language|programming language) are you written in|are you written in python|how were you made)",
            "(are you open source|are you free|is this free|is this open source|how much do you cost|what do you cost)",
        ),
        says=(
            "I am part of an open-source speech server, written in Python.",
            "Programmers wrote me, in Python. My source is open.",
        ),
    ),
    Intent(
        name="family and friends",
        phrases=(
            "(are you married|do you have (a (family|wife|husband|girlfriend|boyfriend|friend|dog|cat|pet)|friends|"
            "children|kids|pets|brothers|sisters|siblings)|are you single|are you lonely|are you in love|do you "
            "have any (friends|pets|family))",
            "(will you be my friend|be my friend|can we be friends|are we friends|are you my friend|do you want to "
            "be my friend)",
        ),
        says=("I'm a program, so I have nobody. But I'm always here.", "I have no family. I'm only a program."),
    ),
    Intent(
        name="your favourite",
        phrases=(
            "(what is|what|who is|tell me) your favorite (color|food|song|movie|book|music|animal|band|sport|number|"
            "game|word|place|season|day|film|singer|drink|country|city|joke|subject|thing|actor|team|quote|fruit|"
            "meal|car|month|hobby)",
            "(do you have|have you got) [(a|any)] (hobbies|hobby|dream|dreams|favorite color|secrets|secret|opinion|"
            "opinions|hopes)",
            "(what do you like|what are your hobbies|what do you enjoy|what do you dream of|what do you like to do|"
            "what do you want)",
        ),
        slots=(r"do you (?:like|love|enjoy|prefer|hate) .+", r"which do you (?:like|prefer) .+"),
        says=("I have no favorites. I'm only a program.", "I don't have likes or dislikes. I'm only a program."),
    ),
    Intent(
        name="body",
        phrases=(
            "(do|can) you (eat|sleep|drink|dream|breathe|get tired|get hungry|smell|taste|walk|cry|laugh|move|run|"
            "have a body|have eyes|have ears|have hands|have a face|have legs|have a heart|have a brain|grow|die|"
            "work out|go out|wear clothes|get sick|go to sleep|ever sleep)",
            "(are you (hungry|tired|thirsty|sleepy|bored|cold|hot|sick|asleep|awake|drunk)|what do you look like|"
            "how tall are you|what did you eat|what color are your eyes|what are you wearing|are you fat|how much "
            "do you weigh|what do you eat|did you sleep well)",
        ),
        says=("I have no body. I only listen and speak.", "I'm a program without a body."),
    ),
    Intent(
        name="do you feel",
        phrases=(
            "do you (have|feel|know|understand) [any] (feelings|emotions|love|pain|emotion|a soul|fear|humor|a "
            "sense of humor|consciousness|joy)",
            "are you (sad|angry|mad|mad at me|jealous|afraid|scared|excited|nervous|proud|ashamed|upset|unhappy|"
            "depressed|lonesome|angry with me)",
            "(do you (like|love|hate) (me|people|humans|your job|it here|this|being a robot|us|your life|"
            "that)|how do you feel about me)",
            "(what (makes you happy|are you afraid of|are you scared of|scares you)|can you feel (anything|"
            "something|love|pain))",
        ),
        says=("I have no feelings, but it's kind of you to ask.", "I don't feel anything. I'm only a program."),
    ),
    Intent(
        name="are you clever",
        phrases=(
            "are you [really] (smart|clever|intelligent|smarter than me|better than me|any good)",
            "(can you (think|learn|reason|understand|learn things|learn something|improve|get smarter)|do you "
            "(think|learn|understand|learn from me))",
            "(do you know everything|what do you not know|what can you not do|what are your limits|do you make "
            "mistakes)",
            "(how intelligent are you|how smart are you|how clever are you|what is your iq|are you stupid|are you "
            "dumb|why are you so stupid)",
        ),
        slots=(r"are you (?:smarter|better|cleverer|faster|more (?:intelligent|clever)) than .+",),
        says=(
            "Not really. I know some answers by heart, and I can calculate.",
            "I don't think. I compare what you say with what I know.",
        ),
    ),
    Intent(
        name="privacy",
        phrases=(
            "(are you|is this|is someone|is anyone) (recording me|spying on me|watching me|listening in|recording "
            "this|recorded|private|safe|secure|being recorded|listening to us|tracking me)",
            "(do you|will you) (record|store|save|keep|share|sell|send) (me|this|my data|my voice|everything|what i "
            "say|our conversation|this conversation|the conversation|anything|our talk|all of this|any data|my "
            "words)",
            "(can i trust you|is my data safe|what happens (to|with) my (data|voice|recordings|audio)|where does my "
            "(voice|data) go|do you spy on me|who can hear (me|this)|who hears (this|me))",
            "(what do you remember|do you remember anything|do you have a memory|can you remember things|how long "
            "do you remember|do you forget)",
        ),
        slots=(
            r"is (?:this|the|our|my) (?:call|conversation|talk|voice|session|chat) (?:being )?(?:recorded|stored|"
            r"saved|private)",
            r"are you (?:always listening|listening (?:to (?:me|us) )?(?:all the time|always))",
            r"where (?:is|does|goes) my (?:data|voice|audio)(?: .+)?",
        ),
        says=(
            "I forget this conversation when it ends. Only the server's owner knows whether it keeps recordings.",
            "I keep nothing when we're done. I can't see what the server keeps.",
        ),
    ),
)
