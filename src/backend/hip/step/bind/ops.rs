//! Lowering of single operations, of fused gates, and of rows that are not copied.

use super::forms::{Form, Wanted, are_grouped, form};
use super::limits;
use super::lower::Lower;
use super::unit::{
    Add, Attend, Cap, Choice, Embed, ExpertSet, Experts, Gate, GatedProducts, Grouped, Home, Norm, Open,
    Product, Products, Route, TableRows, Take, Unit, View, Work, is_apart, of_products,
};
use crate::backend::BackendError;
use crate::backend::hip::kernels::matmul::choice;
use crate::backend::hip::kernels::thresholds::{ATTENTION_ROWS, WIDE_HEAD_ROWS};
use crate::backend::hip::step::Modes;
use crate::backend::hip::step::run::{TILE_QUERIES, attend_leaves_floats, tile_queries};
use crate::program::{
    Activation, ExpertRange, NormKind, Op, Rows, State, StateId, TableRow, TensorId, ValueId,
};
use crate::tensor::DType;

/// Most matrices per launch.
const TOGETHER: usize = 3;

/// A window whose half is more than the positions of any text.
const WHOLE_TEXT: u32 = 1 << 31;

impl Lower<'_> {
    /// Handles an operation that is part of a fused unit.
    pub fn absorbed(&mut self, number: usize, op: &Op) -> Result<(), BackendError> {
        if let Op::Take { from, .. } = *op {
            let view = self.float(self.read(number, from)?)?;
            let wrote = self.wrote(number)?;
            self.last_rows = Some(view);
            self.taken.insert(wrote, view);
        }
        Ok(())
    }

    /// Lowers an operation that is not fused.
    pub fn single(&mut self, number: usize, op: &Op) -> Result<(), BackendError> {
        match *op {
            Op::Embed { table, scale, .. } => self.embed(number, table, scale),
            Op::AddRow { table, row, .. } => self.add_row(number, table, row),
            Op::Take { from, .. } => self.take(number, from),
            Op::Norm { .. } => self.norm(number, op),
            Op::Project { weight, bias, from, out, add } => {
                self.project(number, [from, out], weight, bias, add)
            }
            Op::ProjectHeads { .. } => self.project_heads(number, op),
            Op::JoinHeads { .. } => self.join_heads(number, op),
            Op::Rope { rope, head_dim, .. } => self.rope(number, rope, head_dim),
            // Every store is part of a heads unit.
            Op::Store { .. } => Err(BackendError::Internal("a KV store has no heads unit".to_owned())),
            Op::Attend { .. } => self.attend(number, op),
            Op::Gate { activation, gate, up, .. } => self.gate(number, activation, gate, Some(up)),
            Op::Activate { activation, from, .. } => self.gate(number, activation, from, None),
            Op::Route { .. } => self.route(number, op),
            Op::Experts { .. } => self.experts(number, op),
            Op::Add { from, scale, .. } => {
                let from = self.float(self.read(number, from)?)?;
                self.add(number, Some(from), scale)
            }
            Op::Cap { cap, value } => self.cap(number, cap, value),
            Op::Open { gate, value } => self.open(number, gate, value),
            Op::Scale { by, .. } => self.add(number, None, by),
            Op::Slice { .. }
            | Op::Multiply { .. }
            | Op::Rescale { .. }
            | Op::Sparsify { .. }
            | Op::MixStreams { .. }
            | Op::AddToStreams { .. } => self.streams(number, op),
            Op::Convolve { .. } | Op::SelectiveScan { .. } | Op::DeltaRule { .. } => {
                self.recurrent(number, op)
            }
        }
    }

    fn embed(&mut self, number: usize, table: TensorId, scale: f32) -> Result<(), BackendError> {
        let tensor = limits::tensor(self.program, table)?;
        limits::table(tensor)?;
        if self.parts.len() > 1 {
            return Err(limits::operation("an embedding table after the first part"));
        }
        let dtype = tensor.dtype();
        let row_bytes = dtype.row_bytes(tensor.shape().cols()).and_then(|bytes| usize::try_from(bytes).ok());
        let row_bytes = row_bytes.ok_or(BackendError::Dims(
            "a row of the embedding table is not a whole number of quant blocks",
        ))?;
        let first = self.tables.last().map_or(0, |last| (last.first + last.row_bytes).next_multiple_of(16));
        self.tables.push(TableRows { table, row_bytes, first, scale: 1.0, added: Vec::new() });
        let first = u32::try_from(first).map_err(|_| BackendError::Dims("rows of tables exceed 4 GiB"))?;
        let wrote = self.wrote(number)?;
        let value = self.value(self.version(wrote)?.value)?;
        if value.rows != Rows::All {
            return Err(limits::operation("embeddings of only the rows with logits"));
        }
        if let Some(out) = self.fresh(wrote, true)?.float {
            self.emit(Work::Embed(Embed { dtype, cols: value.width, scale, first, out }), Rows::All);
        }
        self.convert(wrote)
    }

    /// Adds a row of a table to the embeddings, which the host then sums up and sends in f32.
    fn add_row(&mut self, number: usize, table: TensorId, row: TableRow) -> Result<(), BackendError> {
        let wrote = self.wrote(number)?;
        let before = self.version(wrote)?.before.map(|before| self.float(before)).transpose()?;
        let last = self.parts.last_mut().and_then(|part| part.units.last_mut());
        let (Some(Unit { work: Work::Embed(embed), .. }), Some(rows)) = (last, self.tables.last_mut()) else {
            return Err(limits::operation("rows of a table added to anything but embeddings"));
        };
        if before != Some(embed.out) {
            return Err(limits::operation("rows of a table added to anything but the last embeddings"));
        }
        rows.added.push((table, row));
        rows.row_bytes = embed.cols as usize * size_of::<f32>();
        if embed.dtype != DType::F32 || embed.scale != 1.0 {
            (rows.scale, embed.scale, embed.dtype) = (embed.scale, 1.0, DType::F32);
        }
        self.updated(wrote)?;
        self.convert(wrote)
    }

    fn take(&mut self, number: usize, from: ValueId) -> Result<(), BackendError> {
        let (from, wrote) = (self.float(self.read(number, from)?)?, self.wrote(number)?);
        self.last_rows = Some(from);
        let cols = self.value(self.version(wrote)?.value)?.width;
        if let Some(out) = self.fresh(wrote, true)?.float {
            self.emit(Work::Take(Take { from, out, cols }), Rows::Wanted);
        }
        self.convert(wrote)
    }

    fn norm(&mut self, number: usize, op: &Op) -> Result<(), BackendError> {
        let Op::Norm { kind, eps, weight, bias, from, out, add } = *op else { return Ok(()) };
        let (read, wrote) = (self.read(number, from)?, self.wrote(number)?);
        let value = self.value(out)?;
        let shape = limits::tensor(self.program, weight)?.shape();
        let group = shape.cols() as u32; // at most the value's width
        // Each row of a tensor takes whole 16 bytes.
        let weight_stride = if shape.rows() > 1 { group.next_multiple_of(4) } else { 0 };
        let taken = self.taken.get(&read).copied();
        let view = taken.map_or_else(|| self.float(read), Ok)?;
        let wanted = self.version(wrote)?.wanted;
        let in_place = from == out && taken.is_none();
        // All forms except f32 need whole rows without gaps.
        let direct = !add && !in_place && group == value.width && view.stride == value.width;
        let home = if add || in_place { self.updated(wrote)? } else { self.fresh(wrote, !direct)? };
        let unit = Norm {
            centre: kind == NormKind::Layer,
            eps,
            weight: self.operand(weight),
            bias: bias.map(|bias| self.operand(bias)),
            weight_stride,
            from: view,
            takes: taken.is_some(),
            group,
            groups: value.width / group.max(1),
            out: if direct { home } else { Home { float: home.float, ..Home::default() } },
            forms: if direct { wanted } else { Wanted::FLOAT },
            add,
        };
        self.emit(Work::Norm(unit), value.rows);
        if direct { Ok(()) } else { self.convert(wrote) }
    }

    fn product(&mut self, weight: TensorId, bias: Option<TensorId>) -> Result<Product, BackendError> {
        let tensor = limits::tensor(self.program, weight)?;
        limits::matrix(tensor)?;
        let (shape, dtype) = (tensor.shape(), tensor.dtype());
        // The program guarantees that these are widths of values.
        let (rows, cols) = (shape.rows() as u32, shape.cols() as u32);
        let weight = self.operand(weight);
        Ok(Product { weight, bias: bias.map(|bias| self.operand(bias)), dtype, rows, cols })
    }

    fn wanted_by(&self, product: &Product, rows: Rows) -> Wanted {
        let limit = match rows {
            Rows::All => self.limits.rows,
            Rows::Wanted => self.limits.wanted_rows,
        };
        Wanted::by_product(self.modes, product.dtype, product.cols, limit)
    }

    /// Reserves slab room for a matrix with many rows of activations.
    fn expands(&mut self, product: &Product, rows: Rows) {
        self.room.floats |= product.dtype == DType::BF16;
        self.room.sums = self.room.sums.max(choice::gemm_sums(product.rows, product.cols));
        if rows == Rows::All {
            let values = product.rows as usize * product.cols as usize;
            self.room.matrix = self.room.matrix.max(values);
        }
    }

    fn project(
        &mut self,
        number: usize,
        [from, out]: [ValueId; 2],
        weight: TensorId,
        bias: Option<TensorId>,
        add: bool,
    ) -> Result<(), BackendError> {
        let (read, wrote, rows) = (self.read(number, from)?, self.wrote(number)?, self.value(out)?.rows);
        let joins = self.joins;
        let product = self.product(weight, bias)?;
        self.expands(&product, rows);
        let wanted = self.wanted_by(&product, rows);
        let from = self.input(read, wanted)?;
        let home = if add { self.updated(wrote)? } else { self.fresh(wrote, true)? };
        let Some(out) = home.float else { return Ok(()) };
        if !(joins == Some(read) && !add && self.join(from, product, out)) {
            let unit = Products { from, matrices: vec![product], out, add };
            self.emit(Work::Products(unit), rows);
        }
        if !add {
            self.joins = Some(read);
        }
        self.convert(wrote)
    }

    /// Adds a product to the last unit if its outputs follow that unit's outputs. True when it did.
    fn join(&mut self, from: Home, product: Product, out: View) -> bool {
        let now = self.units.saturating_sub(1);
        let Some(part) = self.parts.last_mut() else { return false };
        let operands = part.operands.len() as u32;
        let Some(unit) = part.units.last_mut() else { return false };
        let Work::Products(products) = &mut unit.work else { return false };
        let column = products.out.column + products.matrices.iter().map(|matrix| matrix.rows).sum::<u32>();
        let follows = products.out.plane == out.plane && column == out.column;
        if products.add || !follows || products.matrices.len() >= TOGETHER {
            return false;
        }
        products.matrices.push(product);
        let known = &mut products.from;
        known.float = known.float.or(from.float);
        known.a8 = known.a8.or(from.a8);
        known.half = known.half.or(from.half);
        unit.operands = operands;
        let planes = unit.work.planes();
        planes.into_iter().for_each(|plane| self.planes.touch(plane, now));
        true
    }

    fn attend(&mut self, number: usize, op: &Op) -> Result<(), BackendError> {
        let Op::Attend { state, queries, scale, window, both_ways, cap, alibi, sinks, .. } = *op else {
            return Ok(());
        };
        if alibi && !both_ways {
            return Err(limits::operation(
                "attention to earlier tokens whose scores fall with the distance (ALiBi)",
            ));
        }
        // Scores fall with the distance in tiles that look both ways alone.
        let window = window.or(alibi.then_some(WHOLE_TEXT)).unwrap_or(0);
        let around = both_ways && window > 0;
        let (read, wrote) = (self.read(number, queries)?, self.wrote(number)?);
        let value = self.value(queries)?;
        if value.rows != Rows::All {
            return Err(limits::operation("attention of only the rows with logits"));
        }
        let kv = self.kv(state)?;
        let State::Kv { head_dim, .. } = self.state(state)? else {
            return Err(BackendError::Internal("attention has no keys and values".to_owned()));
        };
        limits::head(head_dim)?;
        let heads = value.width / head_dim;
        let group = heads / kv.heads.max(1);
        let wide = limits::is_wide(head_dim);
        if around && (wide || group > TILE_QUERIES) {
            let heads = format!("{group} query heads of {head_dim} values for each key");
            return Err(limits::operation(format!("attention both ways within a window, of {heads}")));
        }
        if group <= TILE_QUERIES && !wide {
            self.group_max = self.group_max.max(group);
            self.tile_queries = self.tile_queries.min(tile_queries(self.modes, head_dim, around));
        }
        let few = if wide { WIDE_HEAD_ROWS } else { ATTENTION_ROWS };
        self.room.heads = self.room.heads.max(few * heads as usize);
        self.room.head_values = self.room.head_values.max(few * value.width as usize);
        let queries = self.float(read)?;
        let queries = self.whole(queries, value.width, Rows::All);
        let (forms, converts) = self.one_form(wrote)?;
        let spare = attend_leaves_floats(self.modes, (head_dim, group), forms, (self.limits.rows, around));
        let out = self.fresh(wrote, converts || spare)?;
        let known = self.windows.iter().position(|known| *known == window);
        let windows_at = known.unwrap_or_else(|| {
            self.windows.push(window);
            self.windows.len() - 1
        });
        let scale = log2_scale(scale, head_dim);
        let sinks = sinks.map(|sinks| self.operand(sinks));
        let cap = cap.map_or(0.0, |cap| cap * std::f32::consts::LOG2_E);
        let source = None;
        self.both_ways |= both_ways;
        self.around |= around;
        let unit = Attend {
            queries,
            heads,
            head_dim,
            kv,
            scale,
            window,
            both_ways,
            cap,
            falls: alibi,
            sinks,
            windows_at,
            out,
            forms,
            source,
        };
        self.emit(Work::Attend(unit), Rows::All);
        if converts { self.convert(wrote) } else { Ok(()) }
    }

    fn state(&self, id: StateId) -> Result<State, BackendError> {
        let state = self.program.states().get(id.0 as usize).copied();
        state.ok_or_else(|| BackendError::Internal("there is no such state".to_owned()))
    }

    /// Lowers a gate over products that only the gate reads.
    pub fn gated(&mut self, number: usize, products: [usize; 2]) -> Result<(), BackendError> {
        let Some(&Op::Gate { activation, out, .. }) = self.uses.ops.get(number).map(|place| place.op) else {
            return Ok(());
        };
        limits::gate(activation)?;
        let (wrote, value) = (self.wrote(number)?, self.value(out)?);
        let mut found = [None; 2];
        let mut read = 0;
        for (slot, product) in found.iter_mut().zip(products) {
            let op = self.uses.ops.get(product).map(|place| place.op);
            if let Some(&Op::Project { weight, bias, from, .. }) = op {
                *slot = Some(self.product(weight, bias)?);
                read = self.read(product, from)?;
            }
        }
        let [Some(gate), Some(up)] = found else {
            return Err(BackendError::Internal("a fused gate has no products".to_owned()));
        };
        self.expands(&gate, value.rows);
        self.expands(&up, value.rows);
        let wanted = self.wanted_by(&gate, value.rows).and(self.wanted_by(&up, value.rows));
        let from = self.input(read, wanted)?;
        let (forms, converts) = self.one_form(wrote)?;
        let home = self.fresh(wrote, converts)?;
        let fused = |rows| of_products(activation) && self.fuses(&gate, &up, forms, rows);
        let both = (!fused(1) || !fused(self.modes.thresholds().half_from as u32))
            .then(|| limits::width(2 * gate.rows))
            .transpose()?;
        let both = both.map(|cols| self.plane(cols, value.rows));
        let unit = GatedProducts { from, activation, gate, up, both, out: home, forms };
        self.emit(Work::GatedProducts(unit), value.rows);
        if converts { self.convert(wrote) } else { Ok(()) }
    }

    /// Whether one launch computes both products and their gate at this row count.
    fn fuses(&self, gate: &Product, up: &Product, forms: Wanted, rows: u32) -> bool {
        let rows = rows.min(self.limits.rows.max(1) as u32);
        forms.at(rows).only().is_some_and(|out| fuses(self.modes, gate, up, out, rows))
    }

    fn gate(
        &mut self,
        number: usize,
        activation: Activation,
        gate: ValueId,
        up: Option<ValueId>,
    ) -> Result<(), BackendError> {
        limits::gate(activation)?;
        let value = self.value(gate)?;
        let mut gate = self.float(self.read(number, gate)?)?;
        let up = up.map(|up| self.float(self.read(number, up)?)).transpose()?;
        let up = match up {
            Some(up) if up.stride != gate.stride => {
                gate = self.whole(gate, value.width, value.rows);
                Some(self.whole(up, value.width, value.rows))
            }
            up => up,
        };
        let wrote = self.wrote(number)?;
        let (forms, converts) = self.one_form(wrote)?;
        let out = self.fresh(wrote, converts)?;
        let unit = Gate { activation, gate, up, cols: value.width, out, forms };
        self.emit(Work::Gate(unit), value.rows);
        if converts { self.convert(wrote) } else { Ok(()) }
    }

    fn route(&mut self, number: usize, op: &Op) -> Result<(), BackendError> {
        let Op::Route { logits, gating, bias, groups, normalise, scale, out } = *op else { return Ok(()) };
        let (from, out) = (self.value(logits)?, self.value(out)?);
        limits::experts(from.width, out.width, self.limits.rows)?;
        if from.rows != Rows::All {
            return Err(limits::operation("experts of only the rows with logits"));
        }
        let view = self.float(self.read(number, logits)?)?;
        let view = self.whole(view, from.width, Rows::All);
        let bytes = 4 * out.width as usize;
        let choice = Choice {
            chosen: self.bytes(bytes, Rows::All),
            weights: self.bytes(bytes, Rows::All),
            used: out.width,
        };
        let at = self.parts.last().map_or(0, |part| part.units.len());
        let wrote = self.wrote(number)?;
        self.choices.insert(wrote, (choice, at));
        let bias = bias.map(|bias| self.operand(bias));
        let (count, sets) = (from.width, Vec::new());
        let (out, router) = (choice, None);
        let unit = Route { logits: view, count, gating, bias, groups, normalise, scale, out, sets, router };
        self.emit(Work::Route(unit), Rows::All);
        Ok(())
    }

    fn experts(&mut self, number: usize, op: &Op) -> Result<(), BackendError> {
        let Op::Experts { experts: range, factors, biases, choice, activation, from, .. } = *op else {
            return Ok(());
        };
        let [read, chosen] = [self.read(number, from)?, self.read(number, choice)?];
        let (choice, route) = self
            .choices
            .get(&chosen)
            .copied()
            .ok_or_else(|| BackendError::Internal("experts have no routing choice".to_owned()))?;
        let set = self.expert_set(range)?;
        let wrote = self.wrote(number)?;
        let (modes, rows) = (self.modes, self.limits.rows);
        let wanted = |dtype| Wanted::by_experts(modes, set.dtypes, dtype, rows);
        let from = self.input(read, wanted(set.dtypes[0]))?;
        let pairs = choice.used as usize;
        let of_pairs = |lower: &mut Self, cols: u32| {
            let plane = lower.bytes(4 * cols as usize * pairs, Rows::All);
            View { plane, column: 0, stride: cols }
        };
        let forms = wanted(set.dtypes[1]).any();
        let mut gated = self.other_forms(forms, set.ffn, Rows::All, pairs);
        if forms.has(Form::Float) {
            gated.float = Some(of_pairs(self, set.ffn));
        }
        let results = self.bytes(4 * set.out_cols as usize * pairs, Rows::All);
        let grouped = if are_grouped(modes, set.dtypes, rows as u32) {
            let (members, tiles) = (self.bytes(4 * pairs, Rows::All), self.bytes(16 * pairs, Rows::All));
            Some(Grouped { members, tiles })
        } else {
            None
        };
        let has_gates = range.gated;
        let both = if grouped.is_some() || is_apart(has_gates, activation, &factors, biases.as_ref()) {
            let cols = limits::width(if has_gates { 2 * set.ffn } else { set.ffn })?;
            Some(of_pairs(self, cols))
        } else {
            None
        };
        let biases = biases.map(|ids| ids.map(|id| self.operand(id)));
        let factors = factors.map(|id| id.map(|id| self.operand(id)));
        let Some(out) = self.updated(wrote)?.float else { return Ok(()) };
        if out.stride != set.out_cols {
            return Err(limits::operation("experts that add to only a part of a row"));
        }
        let number = self.parts.last_mut().map_or(0, |part| {
            part.experts.push(set);
            part.experts.len() - 1
        });
        let units = self.parts.last_mut().map(|part| &mut part.units);
        if let Some(Work::Route(route)) =
            units.and_then(|units| units.get_mut(route)).map(|unit| &mut unit.work)
        {
            route.sets.push(number);
        }
        let unit = Experts {
            set: number,
            choice,
            from,
            has_gates,
            activation,
            factors,
            biases,
            out,
            gated,
            both,
            results,
            grouped,
        };
        self.emit(Work::Experts(unit), Rows::All);
        self.convert(wrote)
    }

    fn expert_set(&self, range: ExpertRange) -> Result<ExpertSet, BackendError> {
        let [gate, up, down] = range.tensors(0);
        let (gate, down) = (limits::tensor(self.program, gate)?, limits::tensor(self.program, down)?);
        limits::expert(gate)?;
        limits::expert(down)?;
        if limits::tensor(self.program, up)?.dtype() != gate.dtype() {
            return Err(limits::operation("experts whose gate and up matrices have different types"));
        }
        let dtypes: [DType; 2] = [gate.dtype(), down.dtype()];
        let ffn = limits::width(gate.shape().rows() as u32)?;
        // A down matrix has as many rows as the value is wide, and a gate matrix as many columns.
        let (cols, out_cols) = (gate.shape().cols() as u32, down.shape().rows() as u32);
        Ok(ExpertSet { range, dtypes, ffn, cols, out_cols })
    }

    /// `out += scale * from`, or `out *= scale`.
    fn add(&mut self, number: usize, from: Option<View>, scale: f32) -> Result<(), BackendError> {
        let wrote = self.wrote(number)?;
        let value = self.value(self.version(wrote)?.value)?;
        if let Some(out) = self.updated(wrote)?.float {
            let keep = from.is_some();
            let unit = Add { from: from.unwrap_or(out), out, scale, keep, cols: value.width };
            self.emit(Work::Add(unit), value.rows);
        }
        self.convert(wrote)
    }

    /// `value *= sigmoid(gate)`.
    fn open(&mut self, number: usize, gate: ValueId, value: ValueId) -> Result<(), BackendError> {
        let gate = self.float(self.read(number, gate)?)?;
        let cols = self.value(value)?.width;
        self.in_place(number, |rows| Work::Open(Open { gate, rows, cols }))
    }

    /// `value = cap * tanh(value / cap)`.
    fn cap(&mut self, number: usize, cap: f32, value: ValueId) -> Result<(), BackendError> {
        let cols = self.value(value)?.width;
        self.in_place(number, |rows| Work::Cap(Cap { rows, cap, cols }))
    }
}

/// Whether one launch computes both products and their gate, with the result in form `out`.
pub fn fuses(modes: Modes, gate: &Product, up: &Product, out: Form, rows: u32) -> bool {
    let halves = out == Form::Half || form(modes, gate.dtype, rows, gate.cols) == Form::Half;
    let whole = out == Form::Float || gate.rows.is_multiple_of(32);
    !halves && gate.dtype == up.dtype && whole
}

/// Scale of scores in units of log2. The usual scale 1 / sqrt(head_dim) uses a single division.
fn log2_scale(scale: f32, head_dim: u32) -> f32 {
    let root = (head_dim as f32).sqrt();
    if scale == 1.0 / root { std::f32::consts::LOG2_E / root } else { std::f32::consts::LOG2_E * scale }
}
