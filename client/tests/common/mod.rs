//! Shared by the client's tests: values for any message, without a list of its fields.

#![allow(dead_code)] // each test binary uses its own part

use serde::Deserialize;
use serde::de::{DeserializeSeed, EnumAccess, Error as _, SeqAccess, VariantAccess, Visitor, value};

/// A source of values. It is asked for each field, as a decoder asks its input.
pub trait Source {
    /// A number of `bits` bits.
    fn number(&mut self, bits: u32) -> u128;
    /// A finite number.
    fn float(&mut self) -> f32;
    /// A text.
    fn text(&mut self) -> String;
    /// Elements of a list.
    fn count(&mut self) -> usize;
    /// One of `count` enum variants.
    fn variant(&mut self, count: usize) -> usize;
}

/// A message whose fields come from `source`. Extensions get non-critical keys, no key twice.
pub fn filled<T: for<'de> Deserialize<'de>>(source: &mut dyn Source) -> T {
    T::deserialize(Filler { source, field: "" }).unwrap()
}

/// Zeros, empty texts and lists, first variants.
pub struct Smallest;

impl Source for Smallest {
    fn number(&mut self, _: u32) -> u128 {
        0
    }
    fn float(&mut self) -> f32 {
        0.0
    }
    fn text(&mut self) -> String {
        String::new()
    }
    fn count(&mut self) -> usize {
        0
    }
    fn variant(&mut self, _: usize) -> usize {
        0
    }
}

/// Largest numbers, texts of several bytes a character, lists of three, last variants.
pub struct Largest;

impl Source for Largest {
    fn number(&mut self, bits: u32) -> u128 {
        u128::MAX >> (128 - bits)
    }
    fn float(&mut self) -> f32 {
        f32::MAX
    }
    fn text(&mut self) -> String {
        "ünïcødé \u{1f980} \u{10ffff}\n\"\\".to_owned()
    }
    fn count(&mut self) -> usize {
        3
    }
    fn variant(&mut self, count: usize) -> usize {
        count - 1
    }
}

/// Random values, repeatable by seed. Numbers near the ends of their range are frequent.
pub struct Random(pub u64);

impl Random {
    /// splitmix64 (Steele, Lea, Flood 2014).
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `end`.
    pub fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.next() % end as u64).unwrap()
    }
}

impl Source for Random {
    fn number(&mut self, bits: u32) -> u128 {
        let max = u128::MAX >> (128 - bits);
        let any = u128::from(self.next()) << 64 | u128::from(self.next());
        match self.below(4) {
            0 => u128::from(self.next() % 3) & max,
            1 => max - u128::from(self.next() % 3).min(max),
            _ => any & max,
        }
    }
    fn float(&mut self) -> f32 {
        let any = f32::from_bits(self.next() as u32);
        if any.is_finite() { any } else { -0.0 }
    }
    fn text(&mut self) -> String {
        let count = self.below(16);
        let any = |random: &mut Self| char::from_u32(random.next() as u32 % 0x11_0000).unwrap_or('?');
        (0..count).map(|_| if self.below(2) == 0 { 'a' } else { any(self) }).collect()
    }
    fn count(&mut self) -> usize {
        self.below(5)
    }
    fn variant(&mut self, count: usize) -> usize {
        self.below(count)
    }
}

/// First key for optional extensions; the keys below are reserved for real ones.
const EXT_KEY_FIRST: u16 = 0x7f00;

struct Filler<'a> {
    source: &'a mut dyn Source,
    /// The field that is being filled.
    field: &'static str,
}

impl Filler<'_> {
    fn number<T: TryFrom<u128>>(&mut self) -> T {
        let bits = 8 * size_of::<T>() as u32;
        T::try_from(self.source.number(bits)).ok().unwrap()
    }
}

macro_rules! numbers {
    ($($method:ident $visit:ident,)+) => {
        $(fn $method<V: Visitor<'de>>(mut self, visitor: V) -> Result<V::Value, Self::Error> {
            visitor.$visit(self.number())
        })+
    };
}

impl<'de> serde::Deserializer<'de> for Filler<'_> {
    type Error = value::Error;

    numbers! {
        deserialize_u8 visit_u8, deserialize_u16 visit_u16, deserialize_u32 visit_u32, deserialize_u64 visit_u64,
        deserialize_u128 visit_u128,
    }

    fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Self::Error> {
        Err(value::Error::custom("a type that messages do not use"))
    }

    fn deserialize_bool<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Self::Error> {
        visitor.visit_bool(self.source.number(1) == 1)
    }

    fn deserialize_f32<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Self::Error> {
        visitor.visit_f32(self.source.float())
    }

    fn deserialize_string<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Self::Error> {
        visitor.visit_string(self.source.text())
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Self::Error> {
        if self.source.variant(2) == 0 { visitor.visit_none() } else { visitor.visit_some(self) }
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Self::Error> {
        let count = self.source.count();
        if self.field == "ext" {
            return visitor.visit_seq(Extensions { source: self.source, left: count });
        }
        // Lists with a small limit of their own; the other limits are far above what sources give.
        visitor.visit_seq(Elements { source: self.source, left: count.min(4), fields: &[] })
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Self::Error> {
        visitor.visit_seq(Elements { source: self.source, left: fields.len(), fields })
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Self::Error> {
        let index = self.source.variant(variants.len()) as u32;
        visitor.visit_enum(Variant { source: self.source, index })
    }

    serde::forward_to_deserialize_any! {
        i8 i16 i32 i64 i128 f64 char str bytes byte_buf unit unit_struct newtype_struct tuple tuple_struct map identifier
        ignored_any
    }
}

struct Elements<'a> {
    source: &'a mut dyn Source,
    left: usize,
    fields: &'static [&'static str],
}

impl<'de> SeqAccess<'de> for Elements<'_> {
    type Error = value::Error;

    fn next_element_seed<T: DeserializeSeed<'de>>(
        &mut self,
        seed: T,
    ) -> Result<Option<T::Value>, Self::Error> {
        let Some(left) = self.left.checked_sub(1) else { return Ok(None) };
        self.left = left;
        let (field, rest) =
            self.fields.split_first().map_or(("", self.fields), |(field, rest)| (*field, rest));
        self.fields = rest;
        seed.deserialize(Filler { source: &mut *self.source, field }).map(Some)
    }
}

struct Extensions<'a> {
    source: &'a mut dyn Source,
    left: usize,
}

impl<'de> SeqAccess<'de> for Extensions<'_> {
    type Error = value::Error;

    fn next_element_seed<T: DeserializeSeed<'de>>(
        &mut self,
        seed: T,
    ) -> Result<Option<T::Value>, Self::Error> {
        let Some(left) = self.left.checked_sub(1) else { return Ok(None) };
        self.left = left;
        let bytes: Vec<u8> = filled(self.source);
        let pair = (EXT_KEY_FIRST + left as u16, bytes);
        let entry = value::SeqDeserializer::new([Entry::Key(pair.0), Entry::Bytes(pair.1)].into_iter());
        seed.deserialize(entry).map(Some)
    }
}

/// Key or bytes of an extension.
enum Entry {
    Key(u16),
    Bytes(Vec<u8>),
}

impl<'de> serde::de::IntoDeserializer<'de, value::Error> for Entry {
    type Deserializer = Self;
    fn into_deserializer(self) -> Self {
        self
    }
}

impl<'de> serde::Deserializer<'de> for Entry {
    type Error = value::Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Self::Error> {
        match self {
            Self::Key(key) => visitor.visit_u16(key),
            Self::Bytes(bytes) => visitor.visit_seq(value::SeqDeserializer::new(bytes.into_iter())),
        }
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit unit_struct
        newtype_struct seq tuple tuple_struct map struct enum identifier ignored_any
    }
}

struct Variant<'a> {
    source: &'a mut dyn Source,
    index: u32,
}

impl<'de, 'a> EnumAccess<'de> for Variant<'a> {
    type Error = value::Error;
    type Variant = Filler<'a>;

    fn variant_seed<V: DeserializeSeed<'de>>(
        self,
        seed: V,
    ) -> Result<(V::Value, Self::Variant), Self::Error> {
        let index = value::U32Deserializer::new(self.index);
        Ok((seed.deserialize(index)?, Filler { source: self.source, field: "" }))
    }
}

impl<'de> VariantAccess<'de> for Filler<'_> {
    type Error = value::Error;

    fn unit_variant(self) -> Result<(), Self::Error> {
        Ok(())
    }

    fn newtype_variant_seed<T: DeserializeSeed<'de>>(self, seed: T) -> Result<T::Value, Self::Error> {
        seed.deserialize(self)
    }

    fn tuple_variant<V: Visitor<'de>>(self, _: usize, _: V) -> Result<V::Value, Self::Error> {
        Err(value::Error::custom("a tuple variant, which messages do not use"))
    }

    fn struct_variant<V: Visitor<'de>>(
        self,
        _: &'static [&'static str],
        _: V,
    ) -> Result<V::Value, Self::Error> {
        Err(value::Error::custom("a struct variant, which messages do not use"))
    }
}
