//! Shares of a bounded resource that several users take from, so that no user keeps the others out.
//!
//! A user may hold at most as much as is still free after its taking. So one user alone gets half, n users who want all
//! get 1/(n+1) each, and a newcomer always finds room. A fixed bound of the user may lower that; [`limits`] has those. The last
//! 1/16 of the total is for privileged callers only: root, and the user that the daemon runs as.
//!
//! Amounts have the unit that the owner of a [`Shares`] chooses: bytes, connections, descriptors.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use crate::lock::{Mutex, Rank};

pub mod limits;

/// The part of the total that only privileged callers may take: one sixteenth.
const RESERVE: u64 = 16;

/// A bounded resource and who holds how much of it.
#[derive(Debug)]
pub struct Shares {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    total: u64,
    /// Sum of `uids`.
    held: u64,
    /// Users that hold something.
    uids: HashMap<u32, u64>,
}

/// A user as this module sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Taker {
    /// The user.
    pub uid: u32,
    /// True if the user may take the reserve.
    pub privileged: bool,
}

impl Taker {
    /// That user; privileged if it is one of [`privileged_uids`].
    pub fn of(uid: u32) -> Self {
        Self { uid, privileged: privileged_uids().contains(&uid) }
    }
}

/// Root, and the user that this process runs as.
pub fn privileged_uids() -> [u32; 2] {
    // Asked for once: a frame costs no system call more.
    static OWN: OnceLock<u32> = OnceLock::new();
    [0, *OWN.get_or_init(|| rustix::process::geteuid().as_raw())]
}

/// A user's holding of a resource; given back when this drops.
#[derive(Debug)]
pub struct Charge {
    shares: Arc<Shares>,
    taker: Taker,
    amount: u64,
}

/// The user or users whose holdings leave no room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whose {
    /// The user has its own equal part already, or its fixed bound.
    Own,
    /// All users together hold too much.
    Everybody,
}

/// Why a user gets nothing now, in the unit of the resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The user or users whose holdings leave no room.
    pub whose: Whose,
    /// The amount that the user wanted in addition.
    pub wanted: u64,
    /// The amount that the user holds.
    pub own: u64,
    /// The most that the user may hold now.
    pub limit: u64,
    /// The amount that all users hold.
    pub held: u64,
    /// The whole resource.
    pub total: u64,
    /// True if the fixed bound of a user is what refuses.
    pub fixed: bool,
    /// True if the user may take the reserve: root, and the user of this process.
    pub privileged: bool,
}

impl Refusal {
    /// The refusal in words for the log; amounts are divided by `unit`, whose name is `what`.
    pub fn words(&self, unit: u64, what: &str) -> String {
        let (held, total) = (self.held.div_ceil(unit.max(1)), self.total / unit.max(1));
        let limit = self.limit / unit.max(1);
        format!("{} and may have {limit} now; all users have {held} of {total}", self.begin(unit, what))
    }

    /// True if the amount would be refused even if no user held anything, so that another attempt is of no use.
    pub fn is_final(&self) -> bool {
        self.wanted > usable(self.total, self.privileged).div_ceil(2)
    }

    /// The refusal in words for its user. Only a privileged one is told what all users hold.
    pub fn told(&self, unit: u64, what: &str) -> String {
        let (limit, total) = (self.limit_told() / unit.max(1), self.total / unit.max(1));
        match (self.privileged, self.fixed) {
            (true, _) => self.words(unit, what),
            (false, true) => format!("{} and may have {limit}", self.begin(unit, what)),
            (false, false) => {
                format!("{} and may have about {limit} now, of {total} for all users", self.begin(unit, what))
            }
        }
    }

    /// The most that the user may hold now, as the user is told. It depends on what others hold, so it is rounded down to
    /// sixteenths of the total. It is exact for privileged users, and where the bound is the user's own.
    pub fn limit_told(&self) -> u64 {
        let step = (self.total / RESERVE).max(1);
        if self.privileged || self.fixed { self.limit } else { self.limit - self.limit % step }
    }

    fn begin(&self, unit: u64, what: &str) -> String {
        let of = |amount: u64| amount.div_ceil(unit.max(1));
        let who = match self.whose {
            Whose::Own => "this user's share is used up",
            Whose::Everybody => "all users together leave no room",
        };
        format!("{who}: it has {} {what}, wants {} more", of(self.own), of(self.wanted))
    }
}

impl Shares {
    /// `total` for all users.
    pub fn new(total: u64) -> Arc<Self> {
        let state = State { total, held: 0, uids: HashMap::new() };
        Arc::new(Self { state: Mutex::new(Rank::Shares, state) })
    }

    /// Changes the total. Earlier holdings of users stay theirs.
    pub fn set(&self, total: u64) {
        self.state.lock().total = total;
    }

    /// Takes `amount` for that user.
    ///
    /// # Errors
    /// [`Refusal`].
    pub fn take(self: &Arc<Self>, taker: Taker, amount: u64) -> Result<Charge, Refusal> {
        self.take_within(taker, amount, u64::MAX)
    }

    /// As [`Shares::take`], for a user that may hold at most `bound`.
    ///
    /// # Errors
    /// [`Refusal`].
    pub fn take_within(self: &Arc<Self>, taker: Taker, amount: u64, bound: u64) -> Result<Charge, Refusal> {
        self.state.lock().add(taker, amount, bound)?;
        Ok(Charge { shares: Arc::clone(self), taker, amount })
    }

    /// The amount that all users hold.
    pub fn held(&self) -> u64 {
        self.state.lock().held
    }

    /// The amount of each user that holds anything.
    pub fn holdings(&self) -> Vec<(u32, u64)> {
        self.state.lock().uids.iter().map(|(uid, held)| (*uid, *held)).collect()
    }

    /// The user that holds most, and how much that is.
    pub fn most(&self) -> Option<(u32, u64)> {
        let state = self.state.lock();
        state.uids.iter().max_by_key(|(_, held)| **held).map(|(uid, held)| (*uid, *held))
    }
}

/// The amount that users may have together: without the reserve, unless privileged.
fn usable(total: u64, privileged: bool) -> u64 {
    if privileged { total } else { total.saturating_sub(total / RESERVE) }
}

impl State {
    fn add(&mut self, taker: Taker, amount: u64, bound: u64) -> Result<(), Refusal> {
        let own = self.uids.get(&taker.uid).copied().unwrap_or(0);
        let usable = usable(self.total, taker.privileged);
        // The free amount after the taking and the holding of the user are equal at half of what others leave. Rounded
        // up, so that the last piece of a small resource is of use to somebody.
        let fair = usable.saturating_sub(self.held.saturating_sub(own)).div_ceil(2);
        let limit = fair.min(bound);
        let wants = own.saturating_add(amount);
        // Nothing in addition is never refused: a share may have shrunk since.
        if amount == 0 || wants <= limit {
            self.held = self.held.saturating_add(amount);
            if wants > 0 {
                self.uids.insert(taker.uid, wants);
            }
            return Ok(());
        }
        let users = self.uids.len() as u64 + u64::from(own == 0);
        let fixed = wants > bound;
        let has_its_part = own > 0 && wants > usable / users.saturating_add(1);
        let whose = if fixed || has_its_part { Whose::Own } else { Whose::Everybody };
        let (held, total, privileged) = (self.held, self.total, taker.privileged);
        Err(Refusal { whose, wanted: amount, own, limit, held, total, fixed, privileged })
    }

    fn give_back(&mut self, uid: u32, amount: u64) {
        self.held = self.held.saturating_sub(amount);
        if let Some(own) = self.uids.get_mut(&uid) {
            *own = own.saturating_sub(amount);
            if *own == 0 {
                self.uids.remove(&uid);
            }
        }
    }
}

impl Charge {
    /// Another holding of the same resource for the same user.
    ///
    /// # Errors
    /// [`Refusal`].
    pub fn another(&self, amount: u64) -> Result<Self, Refusal> {
        self.shares.take(self.taker, amount)
    }

    /// The amount held.
    pub fn amount(&self) -> u64 {
        self.amount
    }

    /// Takes more.
    ///
    /// # Errors
    /// [`Refusal`]; what is held stays.
    pub fn grow(&mut self, more: u64) -> Result<(), Refusal> {
        self.grow_within(more, u64::MAX)
    }

    /// As [`Charge::grow`], for a user that may hold at most `bound`.
    ///
    /// # Errors
    /// [`Refusal`]; what is held stays.
    pub fn grow_within(&mut self, more: u64, bound: u64) -> Result<(), Refusal> {
        self.shares.state.lock().add(self.taker, more, bound)?;
        self.amount = self.amount.saturating_add(more);
        Ok(())
    }

    /// Gives back a part.
    pub fn shrink(&mut self, less: u64) {
        let less = less.min(self.amount);
        self.amount = self.amount.saturating_sub(less);
        self.shares.state.lock().give_back(self.taker.uid, less);
    }

    /// Makes it another user's charge, whatever that user holds: for a user whose connection takes another's place.
    pub fn hand_over(&mut self, to: Taker) {
        let mut state = self.shares.state.lock();
        state.give_back(self.taker.uid, self.amount);
        state.held = state.held.saturating_add(self.amount);
        if self.amount > 0 {
            let own = state.uids.entry(to.uid).or_default();
            *own = own.saturating_add(self.amount);
        }
        drop(state);
        self.taker = to;
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.shares.state.lock().give_back(self.taker.uid, self.amount);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn user(uid: u32) -> Taker {
        Taker { uid, privileged: false }
    }

    const ROOT: Taker = Taker { uid: 0, privileged: true };

    /// Takes one by one until refused.
    fn fill(shares: &Arc<Shares>, taker: Taker) -> (Vec<Charge>, Refusal) {
        let mut charges = Vec::new();
        loop {
            match shares.take(taker, 1) {
                Ok(charge) => charges.push(charge),
                Err(refusal) => return (charges, refusal),
            }
        }
    }

    #[test]
    fn an_amount_that_never_fits_is_refused_for_good() {
        let shares = Shares::new(1600);
        assert!(shares.take(user(1), 751).unwrap_err().is_final());
        assert!(shares.take(ROOT, 801).unwrap_err().is_final());
        let _held = (shares.take(ROOT, 800).unwrap(), shares.take(user(1), 350).unwrap());
        assert!(!shares.take(user(2), 750).unwrap_err().is_final(), "it fits once the others are gone");
    }

    #[test]
    fn one_user_gets_half_and_each_newcomer_finds_room() {
        let shares = Shares::new(1600); // of which 1500 are for ordinary users
        let (first, refusal) = fill(&shares, user(1));
        assert_eq!(first.len(), 750);
        let told = Refusal {
            whose: Whose::Own,
            wanted: 1,
            own: 750,
            limit: 750,
            held: 750,
            total: 1600,
            fixed: false,
            privileged: false,
        };
        assert_eq!(refusal, told);
        let mut greedy: Vec<_> = (2..=20).map(|uid| fill(&shares, user(uid)).0).collect();
        // Each takes half of what those before it left.
        assert_eq!(greedy.iter().map(Vec::len).collect::<Vec<_>>()[..4], [375, 188, 94, 47]);
        let refusal = fill(&shares, user(5)).1;
        assert_eq!((refusal.whose, refusal.own, refusal.limit), (Whose::Everybody, 47, 24));
        // Once the first user gives back and takes again, all have equal parts.
        drop(first);
        greedy.truncate(1);
        let mut kept = Vec::new();
        while let [Ok(one), Ok(two)] = [shares.take(user(1), 1), shares.take(user(3), 1)] {
            kept.extend([one, two]);
        }
        assert_eq!(
            (kept.len(), greedy[0].len()),
            (750, 375),
            "each of three has 375 of 1500, and 375 are free"
        );
    }

    #[test]
    fn the_last_sixteenth_is_for_privileged_callers() {
        let shares = Shares::new(1600);
        let greedy: Vec<_> = (1..=60).map(|uid| fill(&shares, user(uid))).collect();
        assert_eq!(shares.held(), 1500);
        assert_eq!(greedy.last().unwrap().1.whose, Whose::Everybody);
        let (root, refusal) = fill(&shares, ROOT);
        assert_eq!((root.len(), refusal.limit), (50, 50), "root has half of the reserve and finds the rest");
        assert!(Taker::of(0).privileged && Taker::of(rustix::process::geteuid().as_raw()).privileged);
        assert!(!Taker::of(54_321).privileged);
    }

    /// Exact numbers of all users would tell each user when others come and go.
    #[test]
    fn only_privileged_users_are_told_what_all_hold() {
        let shares = Shares::new(1600);
        let told = |others: u64| {
            let _held = shares.take(user(1), others).unwrap();
            shares.take(user(2), 1000).unwrap_err().told(1, "x")
        };
        assert_eq!(
            told(10),
            "all users together leave no room: it has 0 x, wants 1000 more and may have about 700 now, of 1600 for all users"
        );
        assert_eq!(told(10), told(90));
        let _held = shares.take(user(1), 10).unwrap();
        assert_eq!(
            shares.take(ROOT, 1000).unwrap_err().told(1, "x"),
            shares.take(ROOT, 1000).unwrap_err().words(1, "x")
        );
        let fixed = shares.take_within(user(2), 8, 7).unwrap_err();
        assert_eq!(
            fixed.told(1, "x"),
            "this user's share is used up: it has 0 x, wants 8 more and may have 7"
        );
    }

    #[test]
    fn a_fixed_bound_holds_for_everybody_and_can_change() {
        let shares = Shares::new(100);
        let held = shares.take_within(ROOT, 3, 3);
        let refusal = shares.take_within(ROOT, 1, 3).unwrap_err();
        assert_eq!((held.is_ok(), refusal.whose, refusal.fixed), (true, Whose::Own, true));
        assert!(shares.take_within(ROOT, 40, 43).is_ok());
        shares.set(1);
        assert_eq!(shares.take(ROOT, 1).unwrap_err().total, 1);
        drop(held);
        assert!(shares.take(user(7), 1).is_ok(), "a resource of one piece is of use to the first comer");
    }

    #[test]
    fn a_charge_grows_shrinks_changes_hands_and_leaves_nothing_behind() {
        let shares = Shares::new(64);
        let mut charge = shares.take(user(1), 0).unwrap();
        assert!(shares.state.lock().uids.is_empty());
        charge.grow(20).unwrap();
        let refusal = charge.grow(u64::MAX).unwrap_err();
        assert_eq!((charge.amount(), refusal.wanted, refusal.limit), (20, u64::MAX, 30));
        assert_eq!(
            refusal.words(10, "x"),
            "this user's share is used up: it has 2 x, wants 1844674407370955162 more and may have 3 now; all users have 2 of 6"
        );
        charge.shrink(5);
        charge.hand_over(user(2));
        assert_eq!((shares.most(), shares.held(), shares.holdings()), (Some((2, 15)), 15, vec![(2, 15)]));
        shares.set(2);
        assert!(charge.grow(0).is_ok(), "nothing more is not refused when the share shrank");
        drop(charge);
        let state = shares.state.lock();
        assert_eq!((state.held, state.uids.len()), (0, 0));
    }
}
