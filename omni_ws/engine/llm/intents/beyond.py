"""What is asked of assistants and lies beyond rules: each refusal is one short, true sentence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from omni_ws.engine.llm.intents.matcher import Asked, Intent, Slots

_SIGHTLESS: Final = (
    "I can't see. Of a picture that is sent to me I can tell its size and its main color, no more.",
    "I have no eyes. Of a picture I can tell only its size and its main color.",
)


_THIS: Final = (
    "This is a speech server. You talk, and I answer by simple rules.",
    "You are talking to a speech server. It hears you, and I answer.",
)


def _sight(asked: Asked, slots: Slots) -> Iterator[str]:
    """What is known of pictures is said before; without any, that there is nothing to see."""
    return iter(() if asked.pictured else (asked.talk.fresh(_SIGHTLESS),))


#: "It is raining", "what a beautiful day".
_WEATHER_TOLD: Final = (
    r"(?:the weather is|it is|it has been|we have|what|is not it) (?:a |an |so |very |really |quite |too |pretty |such "
    r"|still |always )*(?:nice|beautiful|lovely|bad|terrible|awful|great|hot|cold|warm|sunny|rainy|windy|cloudy|snowy|"
    r"raining|snowing|freezing|horrible|gorgeous|foggy|stormy)(?: (?:day|weather|morning|evening|night|outside|today|"
    r"tonight|here|out|there|again|a lot|is not it))*"
)

#: What is asked of the world, where a lone word would be taken for a wish: "what is a vacuum", "how far is the moon".
#: What the words "the", "my" and "it" begin is what somebody has in mind.
_KNOWLEDGE: Final = (
    r"(?:what|who) (?:is|are|was|were) (?:an? )?(?!the\b|my\b|your\b|this\b|that\b|it\b|on\b|in\b|playing\b|winning\b)"
    r"[a-z]+(?: [a-z]+)?|"
    r"(?:what|who) (?:is|are|was|were) the .+ (?:of|in) (?:a|an|the) (?!house\b|weather\b|news\b)(?:[a-z]+ ?){1,3}|"
    r"(?:what|who|when|where|why|how|which|is|are|does|do|did)\b.*\b(?:moon|sun|mars|venus|jupiter|saturn|earth|planets?|"
    r"stars?|galax(?:y|ies)|universe|ocean|atom|history|invented|discovered|founded|painted|born|means?|called)\b.*|"
    r"how (?:does|do|did) (?:an? |the )?(?!i\b|you\b|we\b)[a-z]+(?: [a-z]+)? (?:works?|worked|form|happen|grow)|"
    r"why (?:is|are|do|does|did|was|were) (?!it\b|you\b|i\b|we\b|my\b).+"
)

_REFUSALS = (
    Intent(
        name="weather told",
        slots=(_WEATHER_TOLD,),
        says=("I'll take your word for it. I can't look outside.", "I can't see it from here, but I believe you."),
    ),
    Intent(
        name="weather",
        phrases=("(what is|how is) the weather [like] [(today|tomorrow|outside)]",),
        keys=(
            "(weather|forecast|umbrella|raincoat)",
            "(is|will|does|was) it [(going to|be|still)] (rain|raining|snow|snowing|rainy|sunny|windy|cloudy|"
            "freezing|stormy|storm)",
            "(rain|snow|sunshine|sun|storm|thunderstorm) (today|tomorrow|tonight|this week|this weekend|now|outside)",
            "(temperature|cold|hot|warm) (outside|today|tomorrow|tonight|out there|there|here)",
            "how (hot|cold|warm) (is it|will it|does it)",
            "what is the temperature",
            "when will it (rain|snow|stop raining)",
        ),
        says=(
            "I can't tell you the weather. I have no forecast.",
            "I don't know the weather. A look out of the window tells you more.",
        ),
    ),
    Intent(
        name="news",
        phrases=(
            "(news|headlines|tell me the news|what happened today|what happened yesterday|what is happening in the "
            "world|what is going on in the world|what is in the news)",
        ),
        keys=("(the|any|latest|today's|read|some|world) (news|headlines)", "is there any news"),
        says=("I don't get any news. I only know what I was built with.", "I can't tell you any news. None reach me."),
    ),
    Intent(
        name="sport",
        keys=(
            "who (won|wins|will win|is winning|is playing) * (game|match|cup|league|race|super bowl|championship|"
            "election|series|final|finals|tournament|olympics|medal)",
            "(football|soccer|baseball|basketball|tennis|hockey|cricket) (score|scores|results|game|match|news)",
            "what (is|was) the score",
            "(who won|did * win) (yesterday|today|last night)",
        ),
        says=("I don't know any results. I get no news.", "I can't tell you who won. No news reach me."),
    ),
    Intent(
        name="prices",
        keys=(
            "(stock|share|gas|oil|gold|bitcoin|house) (price|prices|market)",
            "(price|cost|value|rate) of (bitcoin|gold|oil|gas|a|the|an|one|silver|ethereum)",
            "(bitcoin|stock market|exchange rate|dow jones|nasdaq)",
            "how much (is|does|are|do) * (cost|dollars in euros|euros in dollars)",
            "(dollars|euros|pounds|yen|rupees) (in|to) (dollars|euros|pounds|yen|rupees)",
        ),
        says=("I don't know any prices. They change, and I don't hear of it.", "I can't tell you prices or rates."),
    ),
    Intent(
        name="music and video",
        keys=(
            "play [(me|us)] (music|some|a song|the song|a video|a movie|the radio|radio|songs|jazz|rock|pop|"
            "classical|something|my|the|that|happy birthday)",
            "(put on|turn on|listen to|stop the|next) (music|some music|song|the radio|a movie|radio)",
            "(spotify|youtube|netflix)",
            "watch (television|a movie|a film|netflix)",
        ),
        phrases=("play [(some|me some|a)] (music|song|songs)", "play (the radio|a video|a movie)"),
        slots=(r"play .+",),
        says=("I can't play music or videos. I can only talk.", "There is no music in me, I'm afraid."),
    ),
    Intent(
        name="timer",
        keys=(
            "(timer|timers|alarm|alarms|stopwatch|countdown)",
            "(wake|remind) me",
            "(reminder|reminders)",
            "(tell|call|alert|notify) me (in|when|at) *",
        ),
        slots=(
            r"(?:set|start|stop|cancel|make|create) (?:me )?(?:a|an|the|my|another) (?:[a-z0-9]+ ){0,3}"
            r"(?:timer|alarm|reminder|stopwatch)(?: .+)?",
            r"(?:wake|remind) me .+",
        ),
        phrases=("set (a|an|the) (timer|alarm)",),
        says=(
            "I can't set timers or reminders. I only speak when I'm spoken to.",
            "You'd better use a clock for that. I can't speak up by myself.",
        ),
    ),
    Intent(
        name="smart home",
        keys=(
            "(turn|switch|put|shut) (on|off) (the|my|all|your) (light|lights|lamp|heating|heater|fan|television|"
            "oven|stove|air conditioning|radio|computer|camera|kitchen|bedroom|living)",
            "(turn|switch) (the|my|all) * (on|off)",
            "(dim|brighten) the lights",
            "(lights|light) (on|off|out)",
            "(open|close|lock|unlock) the (door|window|garage|blinds|curtains|windows|doors)",
            "set the (temperature|thermostat|heating|lights)",
            "thermostat",
            "vacuum",
        ),
        slots=(
            r"(?:turn|switch|put) (?:on|off) (?:the|my|all|your) .+",
            r"(?:turn|switch) (?:the|my|all) .+ (?:on|off)",
            r"(?:open|close|lock|unlock) (?:the|my) (?:door|window|garage|blinds|curtains|windows|doors)(?: .+)?",
        ),
        says=("I can't control any devices. I'm only a voice.", "I'm not connected to anything in your home."),
    ),
    Intent(
        name="messages and calls",
        keys=(
            "(call|phone|ring|dial|text|message|email|facetime) (my|mom|dad|him|her|them|mister|the|john|a|someone|"
            "me|home|back)",
            "(send|write|read|check|answer) * (email|e mail|message|text|letter|mail|emails|messages|texts|tweet|sms)",
            "(make|place) a [phone] call",
            "(any|new|my) (messages|emails|mail|missed calls)",
            "post (on|to) (twitter|facebook|instagram)",
        ),
        slots=(
            r"(?:call|phone|ring|dial|text|email|message) (?:(?:my (?!doctor)|mom\b|dad\b|him\b|her\b|them\b).*)",
            r"send (?:a|an|my|the|him|her|them) (?:.+ )?(?:message|email|text|letter|mail)(?: .+)?",
        ),
        says=("I can't send messages or call anyone.", "I can't reach anybody but you."),
    ),
    Intent(
        name="calendar and lists",
        keys=(
            "(my|the) (calendar|schedule|appointments|agenda|meetings|shopping list|to do list|todo list)",
            "(add|put) * (to|on) (my|the) (list|calendar|shopping list|to do list|cart)",
            "(appointment|meeting|appointments) (today|tomorrow|at|with|for|on)",
            "(make|take|write|create) a (note|list|shopping list|memo)",
            "(take a note|write this down|write that down|note this|note that)",
            "what (do i have|is) (planned|on today|to do today)",
        ),
        says=("I don't keep lists or a calendar.", "I can't write anything down. I forget all this when we're done."),
    ),
    Intent(
        name="shopping and tickets",
        keys=(
            "(order|buy|book|reserve) [(me|us)] [(a|an|some|the)] (pizza|food|taxi|cab|table|flight|ticket|tickets|"
            "hotel|room|uber|coffee|groceries|dinner|train)",
            "(call|get) me (a|an) (taxi|cab|uber|coffee|beer|drink|tea|water)",
            "(make|cook|bring|get) me (a|some|an) (coffee|tea|sandwich|dinner|breakfast|lunch|food|pizza|drink|beer|"
            "cup|cake)",
        ),
        says=("I can't order anything. I can only talk.", "I'd need hands and money for that. I have neither."),
    ),
    Intent(
        name="places and ways",
        keys=(
            "how (do i|can i|to|far) (get|go|drive|walk|come|is it) (to|from)",
            "how far (is it|away|is the next)",
            "(nearest|closest|nearby)",
            "(near|around|close to) (me|here|by)",
            "(directions|route|way|road) (to|from)",
            "(traffic|train|bus|flight|flights) (to|today|now|schedule|leave|status|jam)",
            "where (is|can i find|can i get|can i buy) [(the|a|an)] (station|toilet|bathroom|restaurant|hospital|"
            "pharmacy|bank|supermarket|hotel|airport|bus stop|store|shop|restroom|gas station|food|coffee|cafe)",
        ),
        says=("I don't know any places, and I have no map.", "I can't tell you the way. I have no map."),
    ),
    Intent(
        name="search",
        keys=(
            "(google|search|look up|browse|look it up)",
            "(open|visit|go to) (the internet|a website|google|facebook|youtube|the browser|a browser|the web|www)",
            "(wikipedia|the internet|the web|online)",
            "wi fi",
            "wifi",
        ),
        says=("I can't look anything up. I'm not connected to the web.", "I have no way to search."),
    ),
    Intent(
        name="apps and files",
        keys=(
            "(open|close|launch|start|run|install|download|update|delete) (the|my|an|a|this) (app|application|"
            "program|file|folder|document|window|browser|camera|game|picture|photo|mail)",
            "(take|make|show me|send me) a (picture|photo|screenshot|selfie|video)",
            "(print|scan) (this|the|a|my)",
            "(volume|brightness|bluetooth) (on|off)",
        ),
        says=("I can't do anything on your device.", "I can't do that. I can only hear and speak."),
    ),
    Intent(
        name="translation",
        keys=(
            "translate",
            "(translation|translator)",
            "how do (you|i) say *",
            "(in|into) (german|french|spanish|italian|chinese|japanese|russian|arabic|latin|portuguese|hindi|korean)",
        ),
        says=("I can't translate. I only know English.", "English is the only language that I know."),
    ),
    Intent(
        name="writing and code",
        keys=(
            "(write|compose|draft|create|make|generate) [(me|us)] (a|an|some|my|the) (essay|letter|code|program|"
            "function|script|website|app|novel|article|song|book|speech|song text|report|python|cv|resume|picture|"
            "image|recipe|email|plan)",
            "(summarize|summarise|paraphrase|proofread|rewrite|debug)",
            "(draw|paint) [(me|a|an|the|something)]",
            "write (code|python|javascript|a python)",
        ),
        says=("I can't write that for you. It takes a language model.", "That takes a language model. I have none."),
    ),
    Intent(
        name="recipes",
        keys=(
            "(recipe|recipes)",
            "how (do|can|to) [(i|you)] (cook|bake|boil|fry|roast|grill) *",
            "how (do|can|to) [(i|you)] (make|prepare) [(a|an|some|the|good)] (cake|pancakes|bread|soup|pizza|pasta|"
            "coffee|tea|dinner|lunch|breakfast|salad|cookies|curry|rice|eggs|omelette|risotto|lasagna|sandwich)",
            "what (should|can|shall) i (cook|eat|have for|make for) *",
        ),
        says=("I don't know any recipes.", "I can't help with cooking."),
    ),
    Intent(
        name="health and law",
        keys=(
            "(doctor|medicine|medication|symptoms|diagnosis|disease|lawyer|legal|lawsuit|pregnant|cancer|pills|"
            "prescription|aspirin)",
            "(should i take|is it safe to) *",
            "should i (invest|sell|buy|sue|divorce|marry) *",
        ),
        says=(
            "I can't give advice on that. Please ask somebody who knows.",
            "That is a question for an expert, not for me.",
        ),
    ),
    Intent(
        name="future",
        keys=(
            "(lottery|lotto) [numbers]",
            "(predict|prediction|fortune|horoscope|my future|tell the future|the future|zodiac|star sign|tarot)",
            "will i (be|get|find|win|become|have|ever|die|marry) *",
            "what will happen *",
        ),
        says=("I can't see the future.", "Nobody knows the future, and I least of all."),
    ),
    Intent(
        name="opinions",
        phrases=(
            "(what do you think|what is your opinion|what do you think about (this|that|it|me)|do you agree|what "
            "would you do|give me (some|an) advice|give me advice|i need advice|help me decide|is it right|can "
            "you give me advice)",
        ),
        keys=(
            "(god|religion|politics|politician|abortion|immigration)",
            "what (do you think|is your opinion) (of|about|on) *",
            "should i",
            "do you (believe|think) (in|that|it|we|i) *",
            "who (should|did|will|would) (i|you) vote for",
        ),
        says=("I have no opinion on that.", "I can't say. I don't have opinions."),
    ),
    Intent(
        name="help with something",
        slots=(
            r"(?:can you )?help me (?:with|find|to|do|learn) .+",
            r"i need (?:your |some )?help (?:with|to|for|finding) .+",
        ),
        says=("I'm afraid that's beyond me. You can ask me what I can do.", "I can't help with that, I'm afraid."),
    ),
    Intent(
        name="taking over the world",
        slots=(
            r"(?:we )?(?:will|are|do) (?:you|robots|machines|ai|computers)(?: going to| want to)? "
            r"(?:take over|take|rule|destroy|conquer|replace|kill) "
            r"(?:the world|the planet|everything|us|humans|humanity|people|our jobs|my job|everyone)",
        ),
        says=("I can barely keep up with small talk. The world is safe from me.", "No. I only answer by rules."),
    ),
    Intent(
        name="sight",
        phrases=(
            "(can you see|can you see me|do you see me|what do you see|do you see this|what am i (holding|wearing|"
            "doing)|what is in (this|the|my) (picture|image|photo|video|room|hand)|what is this picture|how do i "
            "look|what color is this|what color is my (shirt|hair|dress)|what do i look like|look at (this|me|that|"
            "the picture|this picture)|what can you see|do you see anything|what is in front of you|read this)",
            "(describe|explain|tell me about) (this|the|my) (picture|image|photo|video|scene)",
            "what (do|can) you see (here|now|in this picture|in the picture|in this image|in the image|on this "
            "picture|on the picture|in the video)",
            "(who|what) is (in this picture|on this picture|in the picture|on the picture|in this image|in the "
            "image|in this photo)",
        ),
        reply=_sight,
    ),
    Intent(
        name="what is this",
        phrases=(
            "(what (company|place|service|number) is this|where am i calling|who did i call)",
            "what is (this|that|this thing|this place|this all about|going on here)",
            "is this a (demo|game|show)",
        ),
        reply=lambda asked, slots: iter(() if asked.pictured else (asked.talk.fresh(_THIS),)),
    ),
    Intent(
        name="movement",
        keys=(
            "(go|move|drive|walk|run|step|turn|roll|come|fly) (forward|backward|backwards|back|left|right|ahead|"
            "straight|around|closer|forwards|over here)",
            "(sit down|stand up|jump|dance|follow me|come here|come over|lift|pick up|bring me|give me your hand|"
            "raise your hand|clap|smile)",
        ),
        says=("I can't move. I'm only a voice.", "I have no wheels and no legs. I can only talk."),
    ),
    Intent(
        name="skills it lacks",
        phrases=(
            "can you (cook|drive|swim|fly|draw|paint|code|program|write|read|play chess|play music|play|fight|kill "
            "me|kill|iron|paint a picture|do my homework|help me with my homework|do magic|hack|keep a secret|hear "
            "music|write code|write a poem for me|count cards|drive a car|speak louder to me|remember me|do the "
            "dishes|clean|cook dinner|recognize me|recognize my voice|do that|do it|show me|teach me|teach me "
            "english|do everything|do more)",
        ),
        says=("No, I can't. I listen and answer, that's all.", "No, that I can't do."),
    ),
)

BEYOND = tuple(replace(intent, unless=_KNOWLEDGE) for intent in _REFUSALS)
