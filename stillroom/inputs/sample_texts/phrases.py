"""How customers of a small shop that also sells telephone contracts put things: the grammar of the demo's messages.

`[a|b|]` is a choice, which may be empty and may hold further choices; `{slot}` is filled from `values.SLOTS`.
Each intent has phrases that every split uses, and phrases that are dealt out, so that the test split says things in
ways that no labelled text of training does. Many phrases name one kind of thing in two roles, in either order (ordered and
delivered, charged and refunded), or something that looks like an entity and is none (a ticket's number, the day a
holiday begins).
"""

from typing import NamedTuple


class Phrases(NamedTuple):
    """`everywhere` is said in all splits, `dealt` in unlabelled text; of it position 1 modulo 3 in validation, 2 in test."""

    everywhere: tuple[str, ...]
    dealt: tuple[str, ...]


INTENTS: dict[str, Phrases] = {
    "refund_request": Phrases(
        (
            "[I'd like|I would like|I want] my money back for the {product}[| from order {order_number}].",
            "You [took|charged|debited] {charge} for the {product}, [please send|I expect|so I want] {refund} back.",
            "I [sent back|returned] the {product} {on_other_date} and [still wait|am waiting] for my {refund}.",
            "[Please refund|Kindly return] {refund}[| to my card], I [paid|was charged] {charge} {on_order_date}.",
            "Of the {charge} I paid, only {refund} [came back|was returned][| so far].",
            "[When|How soon] will I see the {refund} [you owe me|for the {product}]?",
            "The {product} I bought {on_order_date} is [too big|the wrong one], [can I|how do I] get a refund?",
        ),
        (
            "{refund} should be on its way to me after I gave {charge} for this {product}, and nothing happened.",
            "Is there [any way|a way] to return the {product} and have {charge} put back on my account?",
            "My bank shows {charge} gone but no {refund} coming in[| for order {order_number}].",
            "Please reverse the payment of {charge} for {order_number}, the {product} went back {on_other_date}.",
            "You owe me {refund}, because {charge} for the {product} was never agreed.",
            "{charge} left my account {on_order_date}; where is the {refund} you promised?",
        ),
    ),
    "order_status": Phrases(
        (
            "[Where is|What happened to|Any news on] [my order|order] {order_number}[|, the {product}]?",
            "I ordered the {product} {on_order_date} and it [should|was to] [arrive|be here] {on_delivery_date}.",
            "The {product} was [due|promised|announced] {on_delivery_date}[|, and I bought it {on_order_date}].",
            "Order {order_number} from {order_date} [has not moved|is still open|says pending], [what now|any news]?",
            "Tracking [says|shows] {delivery_date} for the {product}, is that [right|still true]?",
            "{on_delivery_date} was [promised|what you told me] when I [ordered|paid] {on_order_date}.",
            "Can you [check|tell me] whether the {product} ships to {city} [soon|before {delivery_date}]?",
        ),
        (
            "[Has|Did] the parcel with the {product} [left|leave] {city} yet? I placed the order {on_order_date}.",
            "My {product} seems stuck in {city}, it was supposed to reach me {on_delivery_date}.",
            "{order_date} is when I paid, {delivery_date} is when you said it would be here.",
            "Any idea when {order_number} gets here? The website said {delivery_date}, the mail said otherwise.",
            "It's been ages since {order_date}, and the courier's date of {delivery_date} has passed as well.",
            "Expecting the {product} {on_delivery_date}, bought {on_order_date}, number {order_number}: all good?",
        ),
    ),
    "change_address": Phrases(
        (
            "[I moved|I have moved|We are moving] [from {city} ][|in]to {city}, please [update|change] my address.",
            "[Please send|Can you send] order {order_number} to [my new home in|] {city} instead of {city}[|, please].",
            "My [new|current] address is in {city}[|, not in {city} any more].",
            "The {product} should go to {person} in {city}, not to me.",
            "[Change|Update] the delivery address of {order_number} to {city}[| before {delivery_date}].",
            "How do I [change|correct] the address [on|in] my account[|, I live in {city} now]?",
            "Since {other_date} I live in {city}, [so ship|please ship] the {product} there.",
        ),
        (
            "You still have {city} on file for me, that should read {city}.",
            "New flat, new city: {city}. [Please adapt my data|Could you note that]?",
            "Deliver the {product} to my neighbour {person} in {city}, I am on holiday from {other_date}.",
            "I won't be in {city} {on_other_date}; can {order_number} be dropped off in {city}?",
            "Kindly redirect {order_number}, {person} in {city} will take it.",
            "As of {other_date} my letters should go to my flat in {city}.",
        ),
    ),
    "cancel_subscription": Phrases(
        (
            "[Please cancel|I want to cancel|Cancel] my {plan} [plan|subscription|contract][| from {other_date}].",
            "I [no longer|don't] need {plan}[| any more], [how do I|please help me] [end|stop] it.",
            "[Stop|End] the {plan} contract, {charge} a month is too much[| for me].",
            "I'm leaving {plan} because [of the price|I moved to {city}|my {product} never worked with it].",
            "My {plan} [runs|was to run] until {other_date}, [do not|please don't] renew it.",
            "I [signed up for|took] {plan} {on_order_date} and [want out|would like to withdraw].",
            "Why do I still pay {charge} for {plan} when I [cancelled|quit] {on_other_date}?",
        ),
        (
            "We won't be needing {plan} from {other_date} onwards.",
            "Consider this my notice for {plan}[|, effective {other_date}].",
            "Please close {plan} and the one in the name of {person} as well.",
            "I'd rather not go on with {plan}, so terminate it [please|as soon as possible].",
            "Get me out of {plan}! Taking {charge} every month for nothing is a joke.",
            "{person} used {plan} until {other_date} and nobody needs it now, so let it end.",
        ),
    ),
    "change_plan": Phrases(
        (
            "[I'd like|I want] to [move|switch|change] from {plan} to {plan}.",
            "[Can I|Could we] [upgrade|downgrade] to {plan}[| for {charge}| before {other_date}]?",
            "What [does|would] {plan} cost [compared with|next to] {plan}?",
            "Is {plan} [better|cheaper] than {plan} [for calls to {city}|for somebody like me]?",
            "[Put|Move] {person} and me on {plan}[| from {other_date}].",
            "My {product} needs more data than {plan} [has|gives], [what do you suggest|which one is next]?",
            "A friend pays {other_amount} elsewhere, can you [match that|do better] with {plan}?",
        ),
        (
            "{plan} is too small for us, is {plan} available in {city}?",
            "Would {plan} work on my {product}, and could I start {on_other_date}?",
            "Swap my {plan} for {plan}, please.",
            "I am on {plan} now; make that {plan} once the month is over.",
            "Does the {product} come with {plan}, or do I stay on {plan}?",
            "Thinking of going up to {plan}, my daughter {person} says {plan} was always enough.",
        ),
    ),
    "technical_problem": Phrases(
        (
            "[The|My] {product} [won't switch on|keeps restarting|does not pair|is dead][| since {other_date}].",
            "[The|My] {product} shows error {ticket}[| and beeps] [whenever I start it|all the time].",
            "[No signal|No internet] [with|on] {plan} [in {city} |][since {other_date}|all day].",
            "I [installed|set up] the {product} {on_delivery_date} when it came, and it [hangs|crashes].",
            "The app [crashes|freezes] when I [enter|type] {order_number}.",
            "[The|My] {product} [disconnects|drops out] [when {person} calls|every few minutes].",
            "[How do I|Can I] connect the {product} to [the|my] {product}?",
        ),
        (
            "The {product} turns itself off after ten minutes, code {ticket} on the display.",
            "Nothing but noise out of this {product} since it was delivered {on_delivery_date}.",
            "Reception around {city} has been terrible with {plan}.",
            "{plan} works at home but not in {city}, what is going on?",
            "I tried the {product} with {person}'s {product} and neither of them reacts.",
            "The light on the {product} blinks red, your robot gave me ticket {ticket} and left.",
        ),
    ),
    "password_reset": Phrases(
        (
            "I [forgot|lost] my password, [my login is|the account is] {email}.",
            "[I can't|Cannot] log in [with|as] {email}[| since {other_date}].",
            "[Please send|Send] the reset link to {email}[| and not to {email}].",
            "The reset [code|text] never [arrived|came] [on|at] {phone}.",
            "[My account|The account of {person}] is locked, [reset it please|can you open it]?",
            "It [says|tells me] that {email} is [unknown|blocked] when I [log in|sign in].",
            "[New phone|I changed my number], so the [login|security] code goes to [the wrong one|{phone}].",
        ),
        (
            "Three wrong tries and now {email} is shut out[|, what next]?",
            "{person} changed our password and I'm locked out, please write to {email}.",
            "Can you text a new password to {phone}?",
            "No mail for a new password has reached {email} so far.",
            "How can I get back into my account? It hangs on {phone}, which I no longer have.",
            "The six digits you texted, {ticket}, do not open my account.",
        ),
    ),
    "complaint": Phrases(
        (
            "{person} [in|from] your {city} [shop|branch] was [rude|very unfriendly][| to me].",
            "[I've been|I was] on hold for {other_amount} worth of calls, [this is a joke|never again].",
            "[Nobody|No one] in {city} [called back|cares], although {person} [promised|said] so.",
            "The {product} [arrived|came] [broken|open|scratched] {on_delivery_date}, [what a mess|I am fed up].",
            "[Third|Second] time I write about {ticket}, [and no answer|does anybody read this]?",
            "I [ordered|paid for] the {product} and [got|was sent] a {product}, [unbelievable|seriously]?",
            "[Worst|Terrible] service [ever|in years]: {person} [hung up on me|laughed at me].",
        ),
        (
            "I spoke with {person} and then with {person}, and each of them blamed {city}.",
            "Shame on you! {charge} for a {product} that fell apart {on_other_date}.",
            "{city} told me to ask {city}, and {city} never picks up.",
            "Your driver threw the {product} over the fence {on_delivery_date}.",
            "{person} said {city} would call me. {city} said {person} would. Nobody did.",
            "The way {person} treated my mother in the {city} store is not acceptable.",
        ),
    ),
    "praise": Phrases(
        (
            "[Many thanks|Big thanks|Thank you] to {person} [in|from] {city}[| for the help with my {product}].",
            "[Love|I love] [the|my] {product}[|, it came {on_delivery_date} as promised].",
            "{person} [solved|fixed] [it|my problem] in [two|five] minutes, [great|brilliant|wow].",
            "[Really happy|Very pleased] with {plan}[|, well worth {charge}].",
            "Ordered {on_order_date}, here {on_delivery_date}: [great|perfect|superb] service.",
            "The [team|people] in {city} [were|are] [so kind|wonderful], [above all|especially] {person}.",
            "[Just wanted to say|I must say]: the {product} is [fantastic|even better than I hoped].",
        ),
        (
            "Five stars for {person}, who drove from {city} to bring me the {product}.",
            "{plan} has never let me down, keep it up.",
            "Got {refund} back within a day, that's how it should be.",
            "What a lovely surprise to find the {product} at my door {on_delivery_date}.",
            "Please give {person} a raise, {city} is lucky to have such people.",
            "Paid {charge}, got {refund} back after the mix-up, {person} was an angel.",
        ),
    ),
    "invoice_question": Phrases(
        (
            "[Why is|How come] my [bill|invoice] {charge}[| instead of {other_amount}]?",
            "[Please send|I need] the invoice for order {order_number}[| of {order_date}] to {email}.",
            "Invoice {ticket} [lists|shows] {charge} for {plan}, [is that right|what is that]?",
            "I was [charged|billed] {charge} [twice|two times] {on_other_date}.",
            "The invoice [says|has] {order_date} but I ordered {on_order_date}.",
            "On [my|the] bill {charge} was taken and {refund} credited, [can you explain|why]?",
            "Could the invoice for the {product} be [made out to|in the name of] {person}[| in {city}]?",
        ),
        (
            "What is the {charge} on my statement for, I only have {plan}?",
            "A credit of {refund} appears next to {charge} on bill {ticket}, I don't understand it.",
            "Our accountant {person} needs a copy of the bill of {other_date} for {order_number}.",
            "The tax on the {product} looks wrong, {charge} in total seems too high.",
            "Is {ticket} the number of the bill or of the order? I can't find the {charge} anywhere.",
            "Your bill adds up to {charge} although {refund} was to be taken off.",
        ),
    ),
}

# Said beside any intent. Dealt out like the phrases above.
DETAILS = Phrases(
    (
        "[My order number is|Order number:|The order is] {order_number}.",
        "[You can reach me|Call me|Reach me] [at|on] {phone}[| or at {email}].",
        "[My number is|Phone:|Tel.] {phone}.",
        "[Please write|Write|Mail me] to {email}.",
        "[My mail is|E-mail:] {email}.",
        "[The ticket is|Your reference:|Ticket no.] {ticket}.",
        "I [talked|spoke] to {person} [about it|in {city}] {on_other_date}.",
        "[I paid|It cost me] {charge}[| when I ordered {on_order_date}].",
        "{order_number} is the order, {phone} is my number.",
        "It [was delivered|came|arrived] {on_delivery_date}.",
        "I [bought|ordered] it {on_order_date}[| in your {city} shop].",
        "[I will be|I'm] in {city} until {other_date}.",
        "[It's for|It is for] my [sister|friend|son] {person}[| in {city}].",
        "I've been a customer [for nine years|since {other_date}].",
        "[Ordered|Bought|Purchased] {on_order_date}, [delivered|arrived|due|promised] {on_delivery_date}.",
        "[Delivery|The parcel] [came|was due|is announced] {on_delivery_date}, the order [dates|is] from {order_date}.",
        "[I paid|You charged|I was billed] {charge}[, you refunded {refund}|, {refund} came back|].",
        "{refund} [was|has been] [refunded|credited|paid back][ of the {charge} I paid| after a charge of {charge}|].",
        "[Refund due|To be refunded|Credit]: {refund}[, charged: {charge}|].",
    ),
    (
        "Ring {phone} and ask for {person}.",
        "{person} in {city} knows about {ticket}.",
        "Answer to {email}, my phone {phone} is switched off until {other_date}.",
        "Customer no. {ticket}, order {order_number}.",
        "Handed over to me {on_delivery_date}, purchased {on_order_date}.",
        "Reference {ticket}, order {order_number}, contact: {phone}.",
        "For a call back: {phone}, ask for {person}.",
        "The order in question, {order_number}, is from {order_date}.",
        "My daughter {person} paid {charge} for it in {city}.",
        "So far I have seen {refund} of the {charge} again.",
        "Should you need it: {email}, {phone}.",
        "{refund} came in, the rest of the {charge} did not.",
    ),
)

GREETINGS = [
    "Hi,",
    "Hello,",
    "Hi {person},",
    "Dear {person},",
    "Hello team,",
    "Good morning,",
    "Hey there!",
    "Hey {person}!",
]
CLOSINGS = [
    "Thanks!",
    "Thank you.",
    "Best, {person}",
    "Regards, {person}",
    "Cheers {person}",
    "{person}, {city}",
    "Please help.",
]
EMOJI = ["😀", "😡", "🙏", "👍", "😭", "📦", "❤️", "🤷🏽‍♀️", "🎉", "📱"]
