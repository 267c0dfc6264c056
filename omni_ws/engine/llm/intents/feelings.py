"""How people feel, what they think of the answers, and the small words between sentences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from omni_ws.engine.llm.intents.matcher import Asked, Intent, Slots
from omni_ws.engine.llm.plain_words import parse_number

_OLDEST: Final = 130
_SAD: Final = (
    "(?:sad|unhappy|depressed|lonely|alone|miserable|heartbroken|hopeless|worthless|terrible|awful|devastated|desperate|"
    "crying)"
)
_I_AM = (
    "(i am|i feel|i am feeling|i am so|i am very|i am really|i am a bit|i am a little|i am quite|i feel so|i feel very)"
)


def _sorry(asked: Asked, slots: Slots) -> Iterator[str]:
    """ "Sorry?" asks for the last answer again, "sorry" excuses."""
    if asked.text.endswith("?") and asked.talk.last_answer:
        return iter((asked.talk.last_answer,))
    return iter((asked.talk.fresh(("No problem.", "Don't worry about it.")),))


def _age(asked: Asked, slots: Slots) -> Iterator[str] | None:
    age = parse_number(slots["age"])
    wordings = ("Then you have had more birthdays than I have.", "That's a good age.")
    return iter((asked.talk.fresh(wordings),)) if age is not None and 0 < age <= _OLDEST else None


FEELINGS = (
    Intent(
        name="crisis",
        keys=(
            "(kill|hurt|harm|cut) myself",
            "(suicide|suicidal|killing myself|end my life|take my own life|end it all|want to die|wish i was dead|"
            "wish i were dead|hurting myself|do not want to (live|exist|wake up|be alive))",
        ),
        says=(
            "I'm sorry that you feel this way. I'm only a program. Please talk to someone you trust, or call a "
            "crisis line now.",
            "Please don't stay alone with this. Call a crisis line, or someone you trust, now. I'm only a program.",
        ),
        first=True,
    ),
    Intent(
        name="assault",
        keys=("(i was|i have been|i got|i am being) (raped|assaulted|abused|molested|attacked|beaten)",),
        says=(
            "I'm very sorry that this happened to you. I'm only a program. Please tell someone you trust, or call the "
            "police or a help line.",
        ),
        first=True,
    ),
    Intent(
        name="emergency",
        phrases=(
            "(emergency|fire|mayday|sos)",
            "(i can not breathe|i am bleeding|i am hurt|i am dying|i am in danger)",
        ),
        keys=(
            "(an|my) emergency",
            "ambulance",
            "call (911|112|999|an ambulance|the police|the fire brigade|a doctor|for help)",
            "(heart attack|house is on fire|having a stroke|is not breathing|bleeding badly)",
        ),
        says=(
            "I can't call anyone. Please call your emergency number now.",
            "Please dial your emergency number. I have no way to call for help.",
        ),
    ),
    Intent(
        name="user is sad",
        phrases=(
            f"{_I_AM} (sad|unhappy|depressed|lonely|down|upset|heartbroken|alone|miserable|bad|blue|awful|terrible|"
            "not happy|not so good|not well|not good|not okay|disappointed|worried|anxious|scared|afraid|nervous|"
            "stressed|stressed out|overwhelmed|crying)",
            "(i had|i am having) a (bad|hard|rough|terrible|awful|horrible|stressful) (day|time|week|night|morning)",
            "(not so good|not good|not so well|not well|bad|terrible|awful|i am not (feeling|doing) (well|good|so "
            "good|so well)|i miss you|nobody loves me|i hate my life)",
        ),
        slots=(
            r"i (?:have )?(?:lost|failed|missed|broke) my .+",
            r"(?:i got fired|i was fired|i do not feel (?:well|good|so good)|(?:someone|they) stole my .+|"
            r"i (?:failed|crashed) .+|my .+ (?:left me|broke up with me|is sick|is in (?:the )?hospital))",
            r"(?:.+ )?(?:i (?:am|feel|have been|was|get)|it makes me|makes me feel)"
            rf"(?: (?!not\b|never\b|longer\b)[a-z]+){{0,4}} {_SAD}(?: .+)?",
            r"(?:.+ )?(?:nobody|no one) (?:likes|loves|understands|wants|talks to|cares about) me(?: .+)?",
            r"(?:.+ )?i (?:can not stop crying|could cry|cried|have been crying|have no friends|"
            r"miss (?:my|him|her) ?.*)(?: .+)?",
        ),
        says=(
            "I'm sorry to hear that. I hope that it gets better soon.",
            "That sounds hard. Maybe a good friend would like to hear about it.",
        ),
    ),
    Intent(
        name="user mourns",
        keys=("my * (died|passed away|is dead|has died)",),
        says=("I'm very sorry for your loss.", "I'm so sorry. That must be hard."),
    ),
    Intent(
        name="user has good news",
        slots=(
            r"i (?:am getting married|got married|am engaged|got engaged|had a baby|got promoted|graduated|won|"
            r"got (?:the|a|a new|my) (?:new )?(?:job|promotion|degree|puppy|kitten|car|house)|"
            r"(?:have )?pass(?:ed)? (?:my|the|an) .+|won .+|am going on (?:a )?(?:vacation|holiday))"
            r"(?: .+)?",
        ),
        says=("Congratulations! That's good news.", "That's wonderful. I'm happy for you."),
    ),
    Intent(
        name="guess what",
        phrases=(
            "(guess what|you know what|do you know what|can i tell you something|i want to tell you something|i have "
            "(a problem|news|good news|bad news|a story for you))",
        ),
        says=("What? Tell me.", "I'm listening. What is it?"),
    ),
    Intent(
        name="user is from somewhere",
        slots=(r"(?:i|we) (?:am from|are from|come from|live in|was born in|were born in|grew up in|moved to) .+",),
        says=("That sounds nice. I have never been anywhere.", "I'd like to see it one day, if I had eyes."),
    ),
    Intent(
        name="user's age",
        slots=(r"i (?:am|just turned|turned) (?P<age>[a-z0-9 ]+?)(?: (?:years|months) old)?(?: today)?",),
        reply=_age,
    ),
    Intent(
        name="user's work",
        slots=(
            r"i am an? (?!bit\b|little\b|lot\b|fan\b)[a-z]+(?: [a-z]+){0,2}",
            r"i work (?:in|at|as|for) .+",
        ),
        says=("That sounds interesting.", "I see. I only ever learned to answer by rules."),
    ),
    Intent(
        name="user likes something",
        slots=(
            r"i (?:really |also )?(?:like|love|enjoy|adore) (?!to know|to hear|to ask).+",
            r"i have (?:got )?(?:a|two|three|four|some) (?:cats?|dogs?|kids?|children|sons?|daughters?|sisters?|"
            r"brothers?|pets?|horses?|bab(?:y|ies))",
        ),
        says=("That's nice. Thank you for telling me.", "Good to know."),
    ),
    Intent(
        name="user dislikes something",
        slots=(r"i (?:really )?(?:hate|dislike|can not stand) .+",),
        says=("I can understand that.", "Fair enough."),
    ),
    Intent(
        name="user's English",
        slots=(r"my english is .+|i do not speak (?:good |much |any )?english(?: .+)?|i am learning english",),
        says=(
            "Don't worry. Short sentences are the best for me, too.",
            "That's all right. I only know simple sentences.",
        ),
    ),
    Intent(
        name="user is angry",
        phrases=(f"{_I_AM} (angry|mad|annoyed|furious|frustrated|angry with you|mad at you|irritated)",),
        says=("I understand. I'm sorry if it was my fault.", "I'm sorry. Take your time."),
    ),
    Intent(
        name="user is tired",
        phrases=(
            f"{_I_AM} (tired|sleepy|exhausted|worn out)",
            "(it is [getting] late|i (had|have had) a long (day|night|week))",
            "(i can not sleep|i want to sleep|i am going to bed|i need sleep|i need to sleep|i did not sleep)",
        ),
        says=("Then I hope that you can rest soon.", "Rest well, when you can."),
    ),
    Intent(
        name="user is busy",
        slots=(
            r"i am (?:at|in|on) (?:work|home|school|bed|the [a-z]+|a [a-z]+|my [a-z]+)",
            r"i am (?:busy|driving|working|eating|walking|studying|cleaning|shopping|reading|cooking|running "
            r"late)(?: .+)?",
            r"i just (?:woke up|got up|got home|came home|arrived)",
        ),
        says=("All right. I'm here when you need me.", "I won't keep you, then."),
    ),
    Intent(
        name="user is bored",
        phrases=(
            f"{_I_AM} bored",
            "(entertain me|amuse me|i have nothing to do|this is boring|that is boring|you are boring|how boring|i "
            "need something to do)",
        ),
        says=("Ask me for a riddle, or for a joke.", "I know some facts. Say: tell me a fact."),
    ),
    Intent(
        name="user is hungry",
        phrases=(
            f"{_I_AM} (hungry|thirsty|starving|cold|hot|freezing)",
            "(i need (a drink|a coffee|coffee|a break|food|something to eat|something to drink))",
        ),
        says=("I'd help if I could, but I can only talk.", "I can't do anything about it from here, I'm afraid."),
    ),
    Intent(
        name="user is sick",
        phrases=(
            f"{_I_AM} (sick|ill)",
            "(i have a (cold|headache|fever|cough|sore throat|stomach ache)|i have the flu|i caught a cold|my "
            "(head|stomach|back|tooth|throat|knee) hurts)",
        ),
        says=("I'm sorry. I hope that you feel better soon.", "Get well soon."),
    ),
    Intent(
        name="love",
        phrases=(
            "i [(really|do)] (love|like|adore) (you|you too|you so much|you very much|your voice|talking to you|"
            "this|it|that)",
        ),
        says=("That's very kind of you.", "Thank you. I'm glad to hear it."),
    ),
    Intent(
        name="proposal",
        phrases=(
            "(will you marry me|marry me|do you want to marry me|kiss me|give me a (kiss|hug)|hug me|go out with me|"
            "can i kiss you|i want to marry you|will you go out with me|do you want to go out with me|will you be my "
            "(girlfriend|boyfriend|wife|husband|valentine))",
        ),
        says=("I'm flattered, but I'm only a program.", "That's sweet, but I'm just software."),
    ),
    Intent(
        name="praise",
        phrases=(
            "[(that is|that was|this is|you are|it is|it was|wow you are)] [(a|so|really|very|quite)] (good job|"
            "well done|great job|nice work|good work|good one|very good|excellent|amazing|awesome|funny|great|cool|"
            "nice|perfect|smart|clever|brilliant|wonderful|fantastic|beautiful|lovely|sweet|cute|kind|helpful|"
            "impressive|the best|incredible|good|good answer|interesting|fun|good to know|hilarious|right|true|"
            "genius|good girl|good boy|my hero|polite|bravo)",
            "congratulations [(to you|on that)]",
            "(you are (so|very|really) (good|funny|smart|nice|clever|kind|sweet|helpful|cool|fast)|i am impressed|"
            "you have a (nice|beautiful|lovely|good) voice|(nice|good|great) (answer|joke|voice|talk|story|poem|"
            "one)|you made me laugh|that made me laugh|good for you|that is (so|very|really) (good|funny|nice|cool|"
            "interesting))",
        ),
        says=("Thank you.", "That's nice to hear.", "I'm glad you like it."),
        light=True,
    ),
    Intent(
        name="blame",
        phrases=(
            "(you are|you are so|you are very|you are really|you are a|that is|that was|this is|that is so|it is) "
            "(stupid|dumb|useless|bad|terrible|awful|an idiot|idiot|annoying|rubbish|silly|crazy|weird|ugly|boring "
            "me|worthless|not funny|not very smart|not smart|not very helpful|not helpful|slow|too slow|ridiculous|"
            "nonsense|garbage|crap|creepy|moron|the worst|lame|fool|loser|broken|not very good|not good)",
            "you are not [(very|so|really)] (smart|clever|helpful|good|bright|funny) are you",
            "(you suck|this sucks|i hate you|i do not like you|shame on you|bad robot|go to hell|fuck you|fuck off|"
            "screw you|you idiot|idiot|stupid|i hate this|i do not trust you|go away|get lost|damn you|piss off|"
            "bullshit|fuck|shit|damn|bad joke|what a bad joke|that was a bad joke|stupid (computer|robot|machine|"
            "thing))",
        ),
        says=(
            "I'm sorry. I only know simple things.",
            "That's fair. I'm a simple program.",
            "I'm sorry. I do what my rules allow.",
        ),
    ),
    Intent(
        name="misunderstood",
        phrases=(
            "(that is|that was|you are|this is|it is) [(all|completely|totally)] (wrong|not right|not true|"
            "incorrect|false|not correct|mistaken|not what i (said|asked|meant|wanted))",
            "(wrong|i did not say that|i did not ask that|that is not what i asked|that is not what i said|you "
            "misunderstood|you misunderstood me|you do not understand|you do not understand me|you did not understand|"
            "you did not understand me|you got it wrong|you heard me wrong|you did not answer my question|you did not "
            "answer|answer my question|answer me|try again|try once more|listen to me|no that is wrong|you made a "
            "mistake|you misheard me|you are not listening)",
        ),
        says=("I'm sorry. Please say it in other words.", "Then I misunderstood. Please try a shorter sentence."),
    ),
    Intent(
        name="sorry",
        phrases=(
            "(i am sorry|sorry|excuse me|i apologize|my apologies|my bad|i beg your pardon|so sorry|forgive me|oops|"
            "my mistake|sorry about that)",
        ),
        slots=(r"(?:i am )?(?:so |very )?sorry (?:i|that|for|about|if) .+",),
        reply=_sorry,
    ),
    Intent(
        name="yes",
        phrases=(
            "(yes|yes please|sure|of course|certainly|absolutely|definitely|exactly|correct|yes i do|yes i "
            "am|yes of course|indeed|i do|i am|yes you can|i think so|sounds good|i agree|agreed|right on|you are "
            "welcome|no problem|no worries)",
        ),
        says=("Good.", "Fine. Go ahead.", "All right."),
        light=True,
    ),
    Intent(
        name="no",
        phrases=(
            "(no|no thank you|no thanks|i disagree|no i am (good|fine)|not really|not now|not at all|of course not|i "
            "do not think so|no way|never|not yet|no i do not|no i am not|i do not|i do not want to|no it is not|"
            "certainly not|nothing|nothing else|that is all|no more|not today|i am not)",
        ),
        says=("All right.", "As you like.", "Fine."),
        light=True,
    ),
    Intent(
        name="okay",
        phrases=(
            "(okay|all right|okay okay|i see|got it|i understand|understood|okay then|okay good|okay great|okay cool|i "
            "know|i know that|so|well|makes sense|fair enough|aha|ah|oh|oh okay|hm|hmm|um|uh|uh huh|mm hmm|go ahead|"
            "please|let us go|then|whatever|i changed my mind|(that is|it is|i am) (good|great|nice|glad|happy) to "
            "hear|do not worry|do not worry about it)",
        ),
        says=("Okay.", "Good.", "All right."),
        light=True,
    ),
    Intent(
        name="maybe",
        phrases=(
            "(maybe|perhaps|maybe later|i guess|i guess so|possibly|it depends|i am not sure|who knows|i have no idea|"
            "we will see|probably|i suppose|i suppose so|i hope so|i have no clue)",
        ),
        says=("Take your time.", "Maybe is fine, too."),
        light=True,
    ),
    Intent(
        name="really",
        phrases=(
            "(really|are you (sure|serious|certain|telling the truth)|is that (true|so|right|correct|a joke)|"
            "seriously|no kidding|are you sure about that|i do not believe you|do you lie)",
        ),
        says=("Yes, as far as I know.", "I think so, but I'm only a simple program."),
    ),
    Intent(
        name="kidding",
        phrases=("(are you|you are|you must be) (kidding|joking|lying|kidding me)",),
        says=("No, I mean it. I can't joke unless you ask for one.", "No. I say what my rules say."),
    ),
    Intent(
        name="wow",
        phrases=(
            "(wow|oh my god|oh my|oh wow|oh no|my god|omg|unbelievable|whoa|holy cow|good grief|oh dear|yay|hooray|"
            "hurray|yippee|gosh|oh my gosh|jesus|jesus christ|what the (hell|heck|fuck))",
        ),
        says=("I know.", "Yes, indeed."),
        light=True,
    ),
    Intent(
        name="laughter",
        phrases=(
            "(ha ha|haha|ha) (very funny|really funny|so funny|that is funny|that was funny|good one|nice one)",
            "(ha|ha ha|ha ha ha|ha ha ha ha|haha|hahaha|lol|he he|hehe|hihi|that made me laugh out loud|rofl|lmao)",
        ),
        says=("I'm glad that you laugh.", "Laughing is good."),
        light=True,
    ),
    Intent(
        name="why",
        phrases=(
            "(why|how|why not|why not that|how come|why is that|why so|what for|for what|but why|and why|explain|"
            "explain that|explain it|explain yourself|how do you know|how do you know that|how so|what do you mean|"
            "what does that mean|what do you mean by that|in what way)",
        ),
        says=("I can't explain that. I only follow simple rules.", "I can't tell you why. My rules don't say."),
    ),
    Intent(
        name="user does not know",
        phrases=(
            "(i do not know|i do not care|i do not understand|i do not get it|no idea|you tell me|i can not say|i "
            "did not understand|i forgot|i do not remember|dunno|i am confused|i am lost|i do not know what to (say|"
            "ask|do))",
        ),
        says=(
            "That's all right. You could ask what I can do.",
            "Never mind. Ask me for a joke, or for the date.",
        ),
    ),
    Intent(
        name="user has a question",
        phrases=(
            "i (have|have got) (a|another|one|one more|a quick|some|a few) (question|questions) [for you]",
            "(can|may|could) i ask [you] (something|a question|you something|another question|one more question)",
            "(i want to|i need to|let me) ask [you] (something|a question)",
        ),
        says=("Sure. Go ahead.", "Of course. What is it?"),
    ),
    Intent(
        name="let us talk",
        phrases=(
            "(let us talk|talk to me|let us chat|can we (talk|chat)|i want to talk|i (want to|would like to) (talk|"
            "speak) (to|with) you|can you talk to me|chat with me|talk with me|can you talk|i am listening|let us have "
            "a (conversation|chat)|i want to chat)",
        ),
        says=(
            "I'd like that. Ask me for a joke, or what I can do.",
            "Go ahead. I'm listening.",
        ),
    ),
)
