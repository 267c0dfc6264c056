"""Whether it works: questions and tests with which people begin."""

from __future__ import annotations

from omni_ws.engine.llm.intents.intent import Intent

HEARING = (
    Intent(
        name="can you hear me",
        phrases=(
            "(can|do|could|did) you (hear|understand|read|get) (me|what i say|what i am saying|this|my voice|"
            "english|me now|me okay|me well|that|us)",
            "(can you hear|are you listening|are you listening to me|do you copy|do you read me|am i audible|can "
            "anyone hear me|is my microphone working|is my mic working|is the microphone working|is my microphone "
            "on|is the mic on|does my microphone work|am i loud enough|is this thing on|is this working|does this "
            "work|is it working|is it on|are you working|do you work|does it work|how do i sound|can you understand "
            "english)",
        ),
        says=("Yes, I can hear you.", "Yes, you come through.", "I hear you."),
    ),
    Intent(
        name="are you there",
        phrases=(
            "(are you|is anyone|is anybody|is someone|is there anyone|are you still) (there|here|home|at home|on|"
            "ready|around|online|up)",
            "(anyone there|anyone home|hello is anyone there|you there|are you ready|are you available|where did "
            "you go|are you busy|are you on|knock|wake up|ping)",
        ),
        says=("Yes, I'm here.", "I'm here, and I'm listening."),
    ),
    Intent(
        name="testing",
        phrases=(
            "[(this is [just] a|just a|a|mic|microphone|sound|audio)] (test|testing|check|test test|testing testing)",
            "[(test|testing|check|mic check|microphone check|hello|test test|testing testing)] (one two|one two "
            "three|1 2|1 2 3|one two one two|1 2 1 2|one two three four|1 2 3 4|one two three four five|1 2 3 4 5)",
            "[(i am|i just want to|just|we are)] testing [(this|you|the microphone|the system|it)]",
            "(test test test|check check|check one two|i am just testing|test message|the quick brown fox jumps "
            "over the lazy dog|blah blah blah|bla bla bla|blah blah|la la la|foo|foo bar|asdf|lorem ipsum|lorem "
            "ipsum dolor sit amet)",
        ),
        says=("The test works. I hear you.", "It works."),
    ),
    Intent(
        name="user can hear",
        phrases=(
            "(i can hear you|i hear you|yes i can hear you|loud and clear|you sound (good|great|nice|human|clear|"
            "funny|fine|natural)|i can hear you now|i hear you well|i can understand you|i understand you)",
        ),
        says=("Good. So we understand each other.", "That's good."),
    ),
    Intent(
        name="user cannot hear",
        phrases=(
            "(i can not|i could not|i did not|i do not) (hear|understand) (you|anything|that|you well|you at all|"
            "you properly|what you said|a word)",
            "(you sound (terrible|awful|strange|weird|robotic|like a robot|bad|horrible|far away)|your voice (is "
            "(terrible|bad|awful|strange|robotic|horrible)|sounds (terrible|bad|awful|strange|robotic|horrible))|i "
            "do not like your voice|your voice is breaking up)",
        ),
        says=(
            "I'm sorry. Please check your speakers, or read along on the screen.",
            "That's a pity. My words are on the screen, too.",
        ),
    ),
)
