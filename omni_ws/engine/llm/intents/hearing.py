"""Whether it works: questions and tests with which people begin."""

from __future__ import annotations

from omni_ws.engine.llm.intents.matcher import Intent

HEARING = (
    Intent(
        name="can you hear me",
        phrases=(
            "(can|do|could|did) you (hear|understand|read|get) (me|what i say|what i am saying|this|my voice|"
            "english|me now|me okay|me well|that|us)",
            "(can you hear|are you listening|are you listening to me|do you copy|do you read me|am i audible|can "
            "anyone hear me|is my microphone working|is my mic working|is the microphone working|is my microphone on|"
            "is the mic on|does my microphone work|am i loud enough|is this thing on|is this working|does this work|is "
            "it working|is it on|am i connected|are we connected|are we live|am i live|are you working|do you work|"
            "does it work|how do i sound|can you understand english)",
        ),
        slots=(r"how (?:well|clearly) (?:can|do) you (?:hear|understand) me",),
        says=("Yes, I can hear you.", "Yes, you come through.", "I hear you."),
    ),
    Intent(
        name="are you there",
        phrases=(
            "(are you|is anyone|is anybody|is someone|is there anyone|are you still) (there|here|home|at home|on|"
            "ready|around|online|up)",
            "(anyone there|anyone home|(is (anyone|someone)|who is) listening|hello is anyone there|you there|are you "
            "ready|are you available|where did you go|are you busy|are you on|knock|wake up|ping)",
        ),
        says=("Yes, I'm here.", "I'm here, and I'm listening."),
    ),
    Intent(
        name="testing",
        phrases=(
            "[(this is [just] a|just a|a|mic|microphone|sound|audio)] (test|testing|check|test test|testing testing)",
            "[(test|testing|check|mic check|microphone check|hello|test test|testing testing)] (one two|one two "
            "three|1 2|1 2 3|one two one two|1 2 1 2|one two three four|1 2 3 4|one two three four five|1 2 3 4 5)",
            "[(i am|i am just|i just want to|i just wanted to|just|we are|we are just)] (testing|test) [(this|you|my "
            "microphone|the microphone|the mic|the system|it|this thing|if it works)]",
            "(test test test|check check|check one two|i am just testing|test message|the quick brown fox jumps "
            "over the lazy dog|blah blah blah|bla bla bla|blah blah|la la la|foo|foo bar|asdf|lorem ipsum|lorem "
            "ipsum dolor sit amet)",
        ),
        slots=(
            r"(?:i (?:just )?(?:want|wanted|need|am going|am trying) to|let me|i am here to|let us) (?:test|try|"
            r"check)(?: (?!again).+)?",
        ),
        says=("The test works. I hear you.", "It works."),
    ),
    Intent(
        name="user can hear",
        phrases=(
            "(i can hear you|i hear you|yes i can hear you|loud and clear|you sound (good|great|nice|human|clear|"
            "fine|natural)|i can hear you now|i hear you well|i can understand you|i understand you|(it|this) "
            "[really] works|it is working|you work)",
        ),
        says=("Good. So we understand each other.", "That's good."),
    ),
    Intent(
        name="user cannot hear",
        phrases=(
            "(i can not|i could not|i did not|i do not) (hear|understand) (you|anything|that|you well|you at all|"
            "you properly|what you said|a word)",
            "i can (barely|hardly|not really) hear you",
            "your (audio|sound|voice) is (cutting out|choppy|breaking|distorted|too quiet|gone)",
            "(you are breaking up|your voice is breaking up|you sound far away|the sound is (bad|terrible|choppy))",
        ),
        says=(
            "I'm sorry. Please check your speakers, or read along on the screen.",
            "That's a pity. My words are on the screen, too.",
        ),
    ),
    Intent(
        name="echo",
        phrases=("[(there is|i hear|why is there|do you hear)] (an|the|my) echo", "(i hear myself|i can hear myself)"),
        says=("I'm sorry. Headphones help against an echo.", "Try headphones. They take the echo away."),
    ),
    Intent(
        name="user dislikes the voice",
        phrases=(
            "you (sound|talk|speak) [so] (terrible|awful|strange|weird|robotic|like a robot|like a machine|bad|"
            "horrible|annoying|boring|creepy|funny)",
            "your voice (is|sounds) [(so|very|really)] (terrible|bad|awful|strange|weird|robotic|horrible|annoying|"
            "boring|creepy|ugly|funny)",
            "i (do not like|hate) your (voice|accent)",
            "why do you (sound|talk|speak) [(so|like)] (weird|strange|funny|robotic|that|this|a robot|bad|boring)",
        ),
        says=(
            "I'm sorry about that. My voice can be changed in the settings.",
            "That's fair. The settings have other voices.",
        ),
    ),
)
