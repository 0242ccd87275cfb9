"""Lists of common English words, for questions over made-up text."""

from __future__ import annotations


def words_of(text: str) -> tuple[str, ...]:
    """Return the words of a text that lists them."""
    return tuple(text.split())


ADJECTIVES = words_of(
    """
    amber ancient bitter blue bold brave brief bright broad broken calm careful cheap clean clever
    cold common copper cosy crisp curious curly damp dark deep dry dull dusty early eager empty
    exact faint fair famous fast final firm flat fond fragile free fresh friendly full gentle giant
    glad golden grand green grey happy harsh heavy hidden hollow honest humble icy idle jolly keen
    kind large late lazy light little lively lonely long loud loyal lucky mellow mild misty modest
    muddy narrow neat new noble odd old open orange pale patient plain polite proud pure quick
    quiet rapid rare red rich ripe rough round royal rusty sharp shy silent silver simple slim slow
    small smooth soft solid sour steady steep stiff strong sunny sweet swift tall tame tender thick
    thin tidy tiny tough vast violet warm weak wet white wide wild wise wooden yellow young
    """
)
NOUNS = words_of(
    """
    acorn anchor ankle apple apron arrow autumn badge basket beach beacon bean bear bell bench
    berry bicycle bird blanket boat bone book bottle bowl branch bread brick bridge broom bucket
    button cabin cable cactus cake camel candle canoe canyon carpet carrot castle cave chain chair
    chalk cherry chest chimney circle clay cliff clock cloud coat coin comet compass coral corner
    cotton cradle crane crown cup curtain daisy deer desert desk diamond donkey door dove dragon
    drum duck eagle elbow elm engine falcon farm feather fence fern ferry field finger fire flag
    flame flute forest fork fountain fox frog garden garlic gate ginger glass glove goat grape
    grass guitar hammer harbor harp hat hawk hazel hedge helmet hill honey hook horn horse hotel
    house island ivory jacket jar jewel kettle key kitchen kite knife knot ladder lake lamp lantern
    leaf lemon letter lily lion lizard lock maple marble market meadow melon mill mirror moon moss
    mountain mouse mushroom nail needle nest nickel night oak oar ocean olive onion orchard otter
    oven owl oyster paddle palace paper parrot path peach peak pearl pebble pencil pepper piano
    pigeon pillow pine pipe planet plate plum pocket pond pony poplar prairie pumpkin quarry quilt
    rabbit raven ribbon rice ring river road robin rocket roof room root rope rose sail salmon sand
    scarf school shadow sheep shell shield ship shirt shoe shovel silk sky sled snow soap spider
    spoon spring square stable star statue steam stone storm stove straw street sugar summer swan
    table tailor tent thistle thread throne thunder tiger timber toad torch tower town trail train
    tree trumpet tulip tunnel turtle umbrella valley vase velvet village vine violin wagon wall
    walnut water wave whale wheat wheel whistle willow window winter wolf wool yard zebra
    """
)
VERBS = words_of(
    """
    accept add agree allow appear argue arrive ask bake beg begin believe borrow bring build burn
    buy carry catch change choose climb collect compare cook count cover cross cry dance decide
    deliver dig divide draw dream drink drive earn eat enjoy enter explain fall feed find finish
    fix float fly fold follow forget gather give grow guess guide hear help hide hold hope hunt
    improve invite join jump keep knit know laugh lead learn leave lend lift listen live lose make
    measure meet melt mend mix move need obey offer order paint pass pay plant play point pour
    praise prepare promise pull push reach read repair repeat reply rest return ride rise run save
    search sell send sew share shine sing sit sleep smile speak spend stand stay steal swim teach
    tell think throw touch travel try turn understand use visit wait walk want wash watch wear
    weave whisper win wish wonder write
    """
)
