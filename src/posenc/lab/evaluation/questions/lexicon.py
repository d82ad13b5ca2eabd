"""English words that questions are made of."""

_ADJECTIVES = """
able ample amber ancient austere bashful bitter blank blunt bold brave brief bright brisk broad
calm candid chilly civil clear clever coarse cosy crimson crisp cubic curly damp dapper daring
deep dense dim distant dry dusty eager early easy elder empty even exact faint fair fancy fast
fertile fickle firm flat fleet fluent formal frank fresh frosty gentle giant glad golden grand
grave green hardy hasty hazy hidden hollow humble icy ideal idle jolly keen kind lavish lean level
light lively lofty loud loyal lucid lunar mellow merry mild modest narrow neat nimble noble opaque
oval pale patient placid plain polite proud quaint quick quiet rapid rare rigid robust rosy rough
round rural rustic sacred scarlet secret sharp shiny silent silver simple sleek slender slow
smooth sober solar solid sparse spare stable steady steep stern still sturdy subtle sudden sunny
swift tall tame tender tidy tiny tranquil upper urban vague vast vivid warm wary weary wide wild
wise witty wooden worthy young zealous
"""

_NOUNS = """
acorn anchor apron arch arrow atlas attic axle badge bakery ballad banner barley barn basin basket
beacon beaver bell bench bishop blanket bonnet bottle bridge brook broom bucket button cabin cable
canal candle canoe canvas carpet castle cedar cellar chapel cherry chimney cinder circus clinic
clock clover cobbler comet compass copper coral cottage cradle crane cricket crown curtain cushion
daisy diary dolphin donkey drawer drum eagle easel elbow engine falcon feather fence ferry fiddle
field flute forest fountain fox galaxy garden garlic gate glacier globe goblet gravel guitar
hammer harbour harvest hedge helmet heron hinge honey horn hotel island ivory jacket jewel jigsaw
kettle kitchen ladder lagoon lantern lemon letter library lizard locket lodge magnet mantle maple
marble market meadow medal melon mill mirror mitten monkey mountain museum mustard napkin needle
nest nickel notebook oak ocean olive orchard otter oven oyster paddle palace parcel parrot pasture
pebble pencil pepper piano pigeon pillow planet plough pocket pond poppy prairie pulley pumpkin
puzzle quarry quilt rabbit radish raven ribbon river robin rocket saddle salmon sandal saucer
scarf school shelf shovel signal spider spoon stable stamp statue stream sugar summit tailor
tavern teapot temple thimble thistle thunder ticket tower tractor trumpet tulip tunnel turnip
valley velvet vessel village violin wagon walnut walrus whistle willow window winter wizard yarn
zebra
"""

ADJECTIVES, NOUNS = tuple(_ADJECTIVES.split()), tuple(_NOUNS.split())
